"""The oracles agree with each other, and the instruments are correct.

Nothing here is about minifsdp. A comparison of minifsdp with an oracle is only as good as the oracle and the
comparison functions. So both are tested first, on cases with a known answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor

from spec_tests.harness import device, ranks
from spec_tests.models import MODELS
from spec_tests.models.sharding import grid
from spec_tests.oracles import (
    BIT_EQUAL,
    FLOAT,
    LOW_PRECISION,
    SAME_MATH,
    Recipe,
    Record,
    adamw,
    assert_same_training,
    clean_name,
    count_collectives,
    flat_chunks,
    forward_backward,
    gather_chunks,
    sgd,
    shard_fsdp1,
    shard_fsdp2,
    split_by_name,
    tolerance_for,
    train_ddp,
    train_single,
    train_torch_fsdp1,
    train_torch_fsdp2,
    units_of,
)

REFUSED_BY_TORCH_FSDP2 = {
    "writes_input": "its inputs pass through a custom autograd function, whose outputs may not be changed in place",
    "one_sided": "it reduces the gradients that are there; the ranks send different sizes, and gloo ends the process",
}
every_model = pytest.mark.parametrize("name", MODELS)
optimizers = pytest.mark.parametrize("optimizer", [sgd, adamw])
Optimizer = Callable[..., torch.optim.Optimizer]


# --- the models ---


@pytest.mark.pure
@every_model
def test_model_construction_is_deterministic_and_keeps_the_random_state(name: str) -> None:
    before = torch.get_rng_state()
    first, second = MODELS[name].build().state_dict(), MODELS[name].build().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.pure
@every_model
def test_batches_differ_only_by_seed_step_and_rank(name: str) -> None:
    def drawn(*key: int) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(MODELS[name].batch(*key))
        return torch.cat([leaf.detach().double().flatten() for leaf in leaves if isinstance(leaf, Tensor)])

    assert torch.equal(drawn(0, 0, 0), drawn(0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(drawn(0, 0, 0), drawn(*other))


@pytest.mark.pure
@every_model
def test_every_trained_parameter_changes_unless_it_may_be_unused(name: str) -> None:
    info = MODELS[name]
    before = {clean_name(key): parameter for key, parameter in info.build().named_parameters()}
    after = train_single(info, 2).parameters
    assert after.keys() == before.keys()
    still = {key for key in before if torch.equal(after[key], before[key].cpu())}
    frozen = {key for key in before if not before[key].requires_grad}
    assert frozen <= still
    assert still == frozen or info.leaves_some_out


# --- the trainers ---


@every_model
@ranks(2)
def test_ddp_trains_every_model_like_a_single_process(name: str) -> None:
    expected = train_single(MODELS[name], 2)
    assert_same_training(train_ddp(MODELS[name]), expected, tolerance_for(2), buffers=dist.get_rank() == 0)


@every_model
@ranks(2)
def test_torch_fsdp1_trains_every_model_like_a_single_process(name: str) -> None:
    expected = train_single(MODELS[name], 2, flat_units=True)
    for use_orig_params in (False, True):
        record = train_torch_fsdp1(MODELS[name], use_orig_params=use_orig_params)
        assert_same_training(record, expected, tolerance_for(2), buffers=dist.get_rank() == 0)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED_BY_TORCH_FSDP2])
@ranks(2)
def test_torch_fsdp2_trains_nearly_every_model_like_a_single_process(name: str) -> None:
    expected = train_single(MODELS[name], 2)
    assert_same_training(train_torch_fsdp2(MODELS[name]), expected, tolerance_for(2), buffers=dist.get_rank() == 0)


@ranks(2)
def test_torch_fsdp2_refuses_a_unit_that_writes_its_input() -> None:
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        train_torch_fsdp2(MODELS["writes_input"])


@pytest.mark.parametrize("name", ["mlp", "uneven", "tied", "unused", "batch_norm", "dropout"])
@optimizers
@ranks(4)
def test_four_ranks_train_like_a_single_process(name: str, optimizer: Optimizer) -> None:
    info, recipe = MODELS[name], Recipe(optimizer=optimizer)
    plain, flat = train_single(info, 4, recipe), train_single(info, 4, recipe, flat_units=True)
    assert_same_training(train_ddp(info, recipe), plain, SAME_MATH)
    assert_same_training(train_torch_fsdp2(info, recipe), plain, SAME_MATH)
    assert_same_training(train_torch_fsdp1(info, recipe), flat, SAME_MATH)
    record = train_torch_fsdp1(info, recipe, sharding_strategy="HYBRID_SHARD", process_group=grid())
    assert_same_training(record, flat, SAME_MATH)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@optimizers
@ranks(2)
def test_the_strategy_of_torch_fsdp1_changes_nothing(
    strategy: str, use_orig_params: bool, optimizer: Optimizer
) -> None:
    for name in ("mlp", "uneven"):
        recipe = Recipe(optimizer=optimizer)
        record = train_torch_fsdp1(
            MODELS[name], recipe, sharding_strategy=strategy, use_orig_params=use_orig_params, backward_prefetch=None
        )
        assert_same_training(record, train_single(MODELS[name], 2, recipe, flat_units=True), tolerance_for(2))


@pytest.mark.parametrize("no_sync", [False, True])
@ranks(2)
def test_accumulation_is_the_same_in_every_trainer(no_sync: bool) -> None:
    info, recipe = MODELS["mlp"], Recipe(accumulate=3, no_sync=no_sync)
    expected = train_single(info, 2, recipe)
    assert expected.losses.shape == (9, 2)
    for record in (train_ddp(info, recipe), train_torch_fsdp1(info, recipe), train_torch_fsdp2(info, recipe)):
        assert_same_training(record, expected, FLOAT)


@ranks(2)
def test_bfloat16_is_near_float32_but_not_equal() -> None:
    expected = train_single(MODELS["mlp"], 2)
    record = train_torch_fsdp1(MODELS["mlp"], mixed_precision={"param_dtype": torch.bfloat16})
    assert_same_training(as_float32(record), expected, LOW_PRECISION)
    with pytest.raises(AssertionError, match="differs in"):
        assert_same_training(as_float32(record), expected, FLOAT)


def as_float32(record: Record) -> Record:
    return replace(record, losses=record.losses.float())


@ranks(2)
def test_weight_decay_changes_flat_parameters_without_gradient_unlike_in_ddp() -> None:
    info, recipe = MODELS["unused"], Recipe(optimizer=adamw)
    plain, flat = train_single(info, 2, recipe), train_single(info, 2, recipe, flat_units=True)
    assert_same_training(train_ddp(info, recipe), plain, tolerance_for(2))
    assert_same_training(train_torch_fsdp1(info, recipe), flat, tolerance_for(2))
    with pytest.raises(AssertionError, match=r"parameter '0\.spare\.weight' differs"):
        assert_same_training(flat, plain, FLOAT, flat=True)


# --- full tensors ---


@pytest.mark.parametrize(
    "name", ["mlp", "uneven", "nested", "tied", "shared_module", "conv", "lstm", "checkpoint_inside"]
)
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_manual_all_gather_equals_torch_summon(name: str, use_orig_params: bool) -> None:
    info = MODELS[name]
    model = shard_fsdp1(torch_fsdp.FullyShardedDataParallel, info, use_orig_params=use_orig_params)
    units = units_of(info.build(), info.unit_classes)
    values, gradients = split_by_name(gather_chunks(flat_chunks(model), dist.group.WORLD), units)
    assert gradients == {}
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        summoned = {key.replace("_checkpoint_wrapped_module.", ""): p for key, p in model.named_parameters()}
        assert values.keys() == summoned.keys()
        assert all(torch.equal(values[key], summoned[key].detach().cpu()) for key in values)


@ranks(2)
def test_flat_shards_are_named_by_unit_and_padded_only_at_the_end() -> None:
    model = shard_fsdp1(torch_fsdp.FullyShardedDataParallel, MODELS["uneven"])
    chunks = flat_chunks(model)
    assert {unit: values.shape for unit, (values, _) in chunks.items()} == {"": (23,), "1": (23,), "2": (1,)}
    values, gradient = gather_chunks(chunks, dist.group.WORLD)["2"]
    assert torch.equal(values, torch.tensor([0.5, 0.0]))
    assert gradient is None


@pytest.mark.pure
def test_units_exclude_parameters_of_inner_units_and_contain_a_shared_parameter_once() -> None:
    def names(info: str) -> dict[str, list[str]]:
        units = units_of(MODELS[info].build(), MODELS[info].unit_classes)
        return {unit: list(shapes) for unit, shapes in units.items()}

    assert names("nested")["0"] == ["0.before.weight", "0.before.bias", "0.after.weight", "0.after.bias"]
    assert names("tied")[""] == ["embedding.weight"]
    assert set(names("shared_module")) == {"first", "middle"}
    assert names("checkpoint_inside")["1"] == ["1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"]


@pytest.mark.pure
def test_too_short_bucket_is_refused() -> None:
    units = {"": {"weight": torch.Size([2, 2]), "bias": torch.Size([1])}}
    values, _ = split_by_name({"": (torch.arange(6.0), None)}, units)
    assert values["weight"].tolist() == [[0, 1], [2, 3]]
    assert values["bias"].tolist() == [4]
    with pytest.raises(AssertionError, match="4 elements cannot hold"):
        split_by_name({"": (torch.arange(4.0), None)}, units)


# --- comparing ---


def a_record(**changes: Any) -> Record:
    parameters = {"a": torch.ones(2), "b": torch.arange(6.0).view(2, 3)}
    return replace(Record(torch.zeros(3, 2), parameters, {"b": torch.ones(2, 3)}, {"mean": torch.zeros(1)}), **changes)


@pytest.mark.pure
def test_the_first_parameter_that_differs_is_named_with_its_largest_difference() -> None:
    wrong = {"a": torch.ones(2), "b": torch.tensor([[0.0, 1.0, 2.1], [3.0, 4.0, 5.5]])}
    with pytest.raises(
        AssertionError, match=r"parameter 'b' differs in 2 of 6 .* is 0\.5, at \(1, 2\): 5\.5 here, 5 in"
    ):
        assert_same_training(a_record(parameters=wrong), a_record(), FLOAT)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": torch.zeros(2, 2)}, r"\(2, 2\) losses"),
        ({"losses": torch.full((3, 2), torch.nan)}, "loss of each rank in micro-batch 0 differs in 2 of 2"),
        ({"parameters": {"a": torch.ones(2)}}, r"missing here \['b'\]"),
        ({"parameters": {"a": torch.ones(1), "b": torch.ones(2, 3)}}, r"'a': torch.float32 of shape \(1,\) here"),
        ({"gradients": {}}, r"gradients differ by name: missing here \['b'\]"),
        ({"gradients": {"b": torch.zeros(2, 3)}}, "last gradient of 'b' differs in 6 of 6"),
        ({"gradients": {"a": torch.zeros(2), "b": torch.ones(2, 3)}}, r"gradients .* unknown to the oracle \['a'\]"),
        ({"buffers": {"mean": torch.ones(1)}}, "buffer 'mean' differs"),
    ],
)
def test_any_difference_is_found(changes: dict[str, Any], message: str) -> None:
    assert_same_training(a_record(), a_record(), BIT_EQUAL, buffers=True)
    with pytest.raises(AssertionError, match=message):
        assert_same_training(a_record(**changes), a_record(), BIT_EQUAL, buffers=True)


# --- counting ---

# All-gathers and reduce-scatters in the second step, three units; the table in docs/orders.md.
COUNTS = {
    "blocks": {"fsdp1": (6, 3), "fsdp2": (6, 3)},
    "called_twice": {"fsdp1": (9, 3), "fsdp2": (12, 3)},
    "several_forwards": {"fsdp1": (9, 3), "fsdp2": (11, 3)},
    "checkpoint_outside": {"fsdp1": (6, 3), "fsdp2": (6, 3)},
    "checkpoint_outside_reentrant": {"fsdp1": (9, 3), "fsdp2": (6, 3)},
}


@pytest.mark.parametrize("name", COUNTS)
@ranks(2)
def test_counter_counts_every_collective_of_torch_in_forward_and_backward(name: str) -> None:
    info = MODELS[name]
    fsdp1, fsdp2 = torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard
    for api, model in (("fsdp1", shard_fsdp1(fsdp1, info)), ("fsdp2", shard_fsdp2(fsdp2, info))):
        forward_backward(model, info, Recipe(), dist.get_rank(), step=0)
        with count_collectives() as counts:
            forward_backward(model, info, Recipe(), dist.get_rank(), step=1)
        gathers, reductions = COUNTS[name][api]
        assert counts.gathers_and_reductions == (gathers, reductions)
        # 280 parameters in a unit, no padding.
        assert counts.num_bytes == {"all_gather": gathers * 1120, "reduce_scatter": reductions * 1120}


@ranks(2)
def test_counter_counts_ddp_and_calls_on_the_process_group() -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(MODELS["mlp"].build().to(device()))
    with count_collectives() as counts:
        forward_backward(ddp, MODELS["mlp"], Recipe(), dist.get_rank(), 0)
    assert counts.num_bytes["all_reduce"] == sum(parameter.nbytes for parameter in ddp.parameters())
    group, local_shard, whole = dist.group.WORLD, torch.ones(3, device=device()), torch.empty(6, device=device())
    with count_collectives() as counts:
        group._allgather_base(whole, local_shard).wait()
        group._reduce_scatter_base(local_shard, whole).wait()
        group.allreduce([local_shard]).wait()
    assert counts.order == [("all_gather", 24), ("reduce_scatter", 24), ("all_reduce", 12)]


@ranks(4)
def test_grid_shards_in_rows_and_replicates_in_columns() -> None:
    shard, replicate = grid()
    row, column = divmod(dist.get_rank(), 2)
    assert dist.get_process_group_ranks(shard) == [2 * row, 2 * row + 1]
    assert dist.get_process_group_ranks(replicate) == [column, column + 2]


@pytest.mark.pure
def test_a_flat_gradient_has_zeros_where_the_oracle_has_no_gradient() -> None:
    zeros = a_record(gradients={"a": torch.zeros(2), "b": torch.ones(2, 3)})
    assert_same_training(zeros, a_record(), BIT_EQUAL, flat=True)
    wrong = a_record(gradients={"a": torch.tensor([0, 1e-9]), "b": torch.ones(2, 3)})
    with pytest.raises(AssertionError, match="'a' differs in 1 of 2"):
        assert_same_training(wrong, a_record(), BIT_EQUAL, flat=True)
    with pytest.raises(AssertionError, match=r"missing here \['b'\]"):
        assert_same_training(a_record(gradients={}), a_record(), BIT_EQUAL, flat=True)
