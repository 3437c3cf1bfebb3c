"""The oracles agree with each other, and comparisons and counters are correct.

Nothing here is about minifsdp. A comparison of minifsdp with an oracle is only as good as both,
so both are tested on cases with a known answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from spec_tests import oracles
from spec_tests.harness import device, ranks
from spec_tests.models import MODELS, apis
from spec_tests.models.sharding import HYBRID_SHARD

TORCH_FSDP1, TORCH_FSDP2 = apis.WRAPPED.of_torch(), apis.FULLY_SHARD.of_torch()
REFUSED_BY_TORCH_FSDP2 = {
    "writes_input": "its inputs pass through a custom autograd function, whose outputs may not be changed in place",
    "one_sided": "it reduces the gradients that are there; the ranks send different sizes, and gloo ends the process",
}


# --- the trainers ---


@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_every_trainer_trains_every_model_like_a_single_process(name: str) -> None:
    info = MODELS[name]
    plain, flat = oracles.train_single(info, 2), oracles.train_single(info, 2, flat_units=True)
    trained = [(oracles.train_ddp(info), plain)]
    trained += [(oracles.train_sharded(api.of_torch(), info), flat) for api in (apis.WRAPPED, apis.ORIGINALS)]
    if name not in REFUSED_BY_TORCH_FSDP2:
        trained.append((oracles.train_sharded(TORCH_FSDP2, info), plain))
    for found, expected in trained:
        oracles.assert_same_training(found, expected, oracles.tolerance_for(2), buffers=dist.get_rank() == 0)


@pytest.mark.parametrize("name", ["mlp", "uneven", "tied", "unused", "batch_norm", "dropout"])
@ranks(4)
def test_four_ranks_train_like_a_single_process_with_adamw(name: str) -> None:
    info, recipe = MODELS[name], oracles.Recipe(optimizer=oracles.adamw)
    plain, flat = oracles.train_single(info, 4, recipe), oracles.train_single(info, 4, recipe, flat_units=True)
    oracles.assert_same_training(oracles.train_ddp(info, recipe), plain, oracles.SAME_MATH)
    oracles.assert_same_training(oracles.train_sharded(TORCH_FSDP2, info, recipe), plain, oracles.SAME_MATH)
    hybrid = oracles.train_sharded(TORCH_FSDP1, info, recipe, strategy=HYBRID_SHARD)
    oracles.assert_same_training(hybrid, flat, oracles.SAME_MATH)


@pytest.mark.parametrize("no_sync", [False, True])
@ranks(2)
def test_accumulation_is_the_same_in_every_trainer(no_sync: bool) -> None:
    info, recipe = MODELS["mlp"], oracles.Recipe(accumulate=3, no_sync=no_sync)
    expected = oracles.train_single(info, 2, recipe)
    assert expected.losses.shape == (9, 2)
    trained = [oracles.train_sharded(api, info, recipe) for api in (TORCH_FSDP1, TORCH_FSDP2)]
    for found in (oracles.train_ddp(info, recipe), *trained):
        oracles.assert_same_training(found, expected, oracles.FLOAT)


@pytest.mark.parametrize("name", ["mlp", "uneven", "nested", "tied", "shared_module", "checkpoint_inside"])
@ranks(2)
def test_manual_all_gather_equals_torch_summon(name: str) -> None:
    info = MODELS[name]
    model = TORCH_FSDP1.shard(info.build().to(device()), unit_classes=info.unit_classes)
    units = oracles.units_of(info.build(), info.unit_classes)
    chunks = oracles.gather_chunks(oracles.flat_chunks(model), dist.group.WORLD)
    values, _ = oracles.split_by_name(chunks, units)
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        summoned = {key.replace("_checkpoint_wrapped_module.", ""): p for key, p in model.named_parameters()}
        assert values.keys() == summoned.keys()
        assert all(torch.equal(values[key], summoned[key].detach().cpu()) for key in values)


# --- comparing ---


def a_record(**changes: Any) -> oracles.Record:
    parameters = {"a": torch.ones(2), "b": torch.arange(6.0).view(2, 3)}
    record = oracles.Record(torch.zeros(3, 2), parameters, {"b": torch.ones(2, 3)}, {"mean": torch.zeros(1)})
    return replace(record, **changes)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": torch.zeros(2, 2)}, r"\(2, 2\) losses"),
        ({"losses": torch.full((3, 2), torch.nan)}, "loss of each rank in micro-batch 0 differs in 2 of 2"),
        ({"parameters": {"a": torch.ones(2)}}, r"missing here \['b'\]"),
        ({"parameters": {"a": torch.ones(1), "b": torch.ones(2, 3)}}, r"'a': torch.float32 of shape \(1,\) here"),
        ({"parameters": {"a": torch.ones(2), "b": torch.ones(2, 3)}}, r"'b' differs in 5 of 6 .* is 4, at \(1, 2\)"),
        ({"gradients": {}}, r"gradients differ by name: missing here \['b'\]"),
        ({"gradients": {"b": torch.zeros(2, 3)}}, "last gradient of 'b' differs in 6 of 6"),
        ({"gradients": {"a": torch.zeros(2), "b": torch.ones(2, 3)}}, r"gradients .* unknown to the oracle \['a'\]"),
        ({"buffers": {"mean": torch.ones(1)}}, "buffer 'mean' differs"),
    ],
)
def test_any_difference_is_found(changes: dict[str, Any], message: str) -> None:
    oracles.assert_same_training(a_record(), a_record(), oracles.BIT_EQUAL, buffers=True)
    with pytest.raises(AssertionError, match=message):
        oracles.assert_same_training(a_record(**changes), a_record(), oracles.BIT_EQUAL, buffers=True)


# --- counting ---


@pytest.mark.parametrize(
    # Three units. The root is all-gathered once, and each block once in forward and once in backward, in each call.
    ("name", "gathers"),
    [("blocks", 6), ("called_twice", 9), ("checkpoint_outside", 6)],
)
@ranks(2)
def test_counter_counts_every_collective_of_a_step(name: str, gathers: int) -> None:
    info, recipe = MODELS[name], oracles.Recipe()
    model = TORCH_FSDP1.shard(info.build().to(device()), unit_classes=info.unit_classes)
    oracles.forward_backward(model, info, recipe, dist.get_rank(), step=0)
    with oracles.count_collectives() as counts:
        oracles.forward_backward(model, info, recipe, dist.get_rank(), step=1)
    assert counts.gathers_and_reductions == (gathers, 3)
    # 280 parameters in a unit, no padding.
    assert counts.num_bytes == {"all_gather": gathers * 1120, "reduce_scatter": 3 * 1120}


@ranks(2)
def test_counter_counts_calls_on_the_process_group() -> None:
    group, local_shard, whole = dist.group.WORLD, torch.ones(3, device=device()), torch.empty(6, device=device())
    with oracles.count_collectives() as counts:
        group._allgather_base(whole, local_shard).wait()
        group._reduce_scatter_base(local_shard, whole).wait()
        group.allreduce([local_shard]).wait()
    assert counts.order == [("all_gather", 24), ("reduce_scatter", 24), ("all_reduce", 12)]
