"""Optimizer states by original names, compared with a single process and, key by key, with torch's own wrapper."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint.checkpoints import (
    FULL,
    LOCAL,
    SHARDED,
    assert_same_state,
    flat_or_original,
    gathered,
    is_plain,
    make,
    quiet,
    step,
    wrapped,
)
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid
from spec_tests.subject import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ModuleWrapPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def single_process(kind: str, steps: int = 2) -> dict[str, dict[str, Any]]:
    """Optimizer states of the plain model by name, trained on the batches of all ranks."""
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(steps):
        step(model, optimizer, number, everybody=True)
    names = [name for name, _ in model.named_parameters()]
    return {names[key]: entries for key, entries in optimizer.state_dict()["state"].items()}


def trained(kind: str, steps: int = 2, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(make(), **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def as_torch(kind: str, steps: int = 2, **options: Any) -> tuple[torch_fsdp.FullyShardedDataParallel, Any]:
    model = torch_fsdp.FullyShardedDataParallel(
        make(), auto_wrap_policy=TorchPolicy({nn.Sequential}), device_id=device(), **options
    )
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


@pytest.mark.spec("OSD-01")
def test_the_signature_is_that_of_torch() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel.optim_state_dict
    ours = inspect.signature(FSDP.optim_state_dict).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in inspect.signature(theirs).parameters.values()
    ]


@pytest.mark.spec("OSD-01", "OSD-03", "OSD-04", "OSD-08")
@flat_or_original
@every_optimizer
@ranks(2)
def test_full_optim_state_dict_equals_a_single_process_under_original_names(kind: str, keep: bool) -> None:
    model, optimizer = trained(kind, use_orig_params=keep)
    found = FSDP.optim_state_dict(model, optimizer)
    expected = single_process(kind)
    assert sorted(found) == ["param_groups", "state"]
    assert_same_state(found["state"], expected, bitwise=False)
    assert sorted(found["param_groups"][0]["params"]) == sorted(
        expected if expected else dict(make().named_parameters())
    )
    assert found["param_groups"][0]["lr"] == 0.01


@pytest.mark.spec("OSD-03", "OSD-04")
@flat_or_original
@every_optimizer
@ranks(2)
def test_optim_state_dict_equals_that_of_torch_bitwise(kind: str, keep: bool) -> None:
    ours = FSDP.optim_state_dict(*trained(kind, use_orig_params=keep))
    with quiet():
        flat = torch_fsdp.FullyShardedDataParallel.optim_state_dict(*as_torch(kind))
        theirs = torch_fsdp.FullyShardedDataParallel.optim_state_dict(*as_torch(kind, use_orig_params=keep))
    assert ours["param_groups"] == theirs["param_groups"]
    # Seen with torch 2.13 on the CPU and original parameters: all states of a parameter share one buffer and have the
    # values of the last. So that case compares only names and shapes. Values are compared with torch's flat parameters.
    assert shapes(ours["state"]) == shapes(theirs["state"])
    assert_same_state(ours["state"], flat["state"])


def shapes(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: (v.shape, v.dtype) for key, v in entries.items()} for name, entries in state.items()}


@pytest.mark.spec("OSD-02")
@flat_or_original
@ranks(2)
def test_a_dict_that_is_passed_is_translated_instead_of_the_optimizers_own(keep: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep)
    before = FSDP.optim_state_dict(model, optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 5)
    assert_same_state(FSDP.optim_state_dict(model, optimizer, own)["state"], before["state"])
    after = FSDP.optim_state_dict(model, optimizer)["state"]
    assert float(after["head.weight"]["step"]) == float(before["state"]["head.weight"]["step"]) + 1


@pytest.mark.spec("OSD-05")
@flat_or_original
@ranks(2)
def test_with_rank0_only_the_other_rank_gets_nothing_and_values_are_on_the_cpu(keep: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep)
    everywhere = FSDP.optim_state_dict(model, optimizer)
    assert all(v.device.type == "cpu" for of in everywhere["state"].values() for v in of.values())
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(), config):
        found = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert_same_state(found["state"], everywhere["state"])
    else:
        assert found == {}


@pytest.mark.spec("OSD-06", "OSD-10")
@pytest.mark.parametrize("use_dtensor", [False, True])
@flat_or_original
@ranks(2)
def test_sharded_optim_state_has_row_shards_and_plain_steps(keep: bool, use_dtensor: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    configs = (
        ShardedStateDictConfig(offload_to_cpu=True, _use_dtensor=use_dtensor),
        ShardedOptimStateDictConfig(offload_to_cpu=True, _use_dtensor=use_dtensor),
    )
    with FSDP.state_dict_type(model, SHARDED, *configs):
        found = FSDP.optim_state_dict(model, optimizer)
        weights = model.state_dict()
    kind = DTensor if use_dtensor else ShardedTensor
    for name, entries in found["state"].items():
        assert isinstance(weights[name], kind)
        assert is_plain(entries["step"])
        assert isinstance(entries["exp_avg"], kind)
        assert torch.equal(gathered(entries["exp_avg"]).cpu(), full["state"][name]["exp_avg"])
    if not use_dtensor and dist.get_rank() == 0:
        shards = found["state"]["first.0.weight"]["exp_avg"].local_shards()
        assert tuple(shards[0].tensor.shape) == (3, 3), "3 of 5 rows"


@pytest.mark.spec("OSD-06")
@flat_or_original
@ranks(2)
def test_sharded_optim_state_has_same_shards_as_torch(keep: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep)
    other, theirs = as_torch("adam", use_orig_params=keep)
    with FSDP.state_dict_type(model, SHARDED):
        ours = FSDP.optim_state_dict(model, optimizer)["state"]
    wrapper = torch_fsdp.FullyShardedDataParallel
    with quiet(), wrapper.state_dict_type(other, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
        expected = wrapper.optim_state_dict(other, theirs)["state"]
    assert ours.keys() == expected.keys()
    for name, entries in expected.items():
        for key, value in entries.items():
            if isinstance(value, ShardedTensor):
                mine = [(s.metadata.shard_offsets, s.tensor) for s in ours[name][key].local_shards()]
                other_pieces = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
                # If a rank stores no rows, minifsdp has an empty shard on it, and torch has no shard.
                mine = [(offsets, rows) for offsets, rows in mine if rows.numel()]
                assert [o for o, _ in mine] == [o for o, _ in other_pieces]
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, other_pieces, strict=True))
            else:
                assert torch.equal(ours[name][key], value)


@pytest.mark.spec("OSD-07")
@ranks(2)
def test_local_state_dict_type_is_refused_for_optimizer_states() -> None:
    model, optimizer = trained("adam", 1)
    with (
        FSDP.state_dict_type(model, LOCAL),
        pytest.raises(NotImplementedError, match=r"rank \d.*not support LOCAL_STATE_DICT"),
    ):
        FSDP.optim_state_dict(model, optimizer)


@pytest.mark.spec("OSD-08")
@flat_or_original
@ranks(2)
def test_several_groups_keep_their_settings_and_name_their_parameters(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    first = list(model.module.first.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in first)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": first, "lr": 0.5, "weight_decay": 0.25}], lr=0.01)
    step(model, optimizer, 0)
    first_group, second = FSDP.optim_state_dict(model, optimizer)["param_groups"]
    assert (first_group["lr"], second["lr"], second["weight_decay"]) == (0.01, 0.5, 0.25)
    names = [name for name, _ in make().named_parameters()]
    assert second["params"] == [name for name in names if name.startswith("first")]
    assert sorted(first_group["params"] + second["params"]) == sorted(names)


@pytest.mark.spec("OSD-08")
@flat_or_original
@ranks(2)
def test_optim_state_dict_supports_frozen_and_ignored_parameters(keep: bool) -> None:
    plain = make()
    plain.first.requires_grad_(False)
    ignored = list(plain.head.parameters())
    model = FSDP(
        plain, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), ignored_states=ignored, use_orig_params=keep
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    found = FSDP.optim_state_dict(model, optimizer)
    assert sorted(found["state"]) == ["head.bias", "head.weight", "scale", "second.0.bias", "second.0.weight"]
    assert sorted(found["param_groups"][0]["params"]) == sorted(name for name, _ in make().named_parameters())
    own = optimizer.state[ignored[0]]["exp_avg"]
    assert torch.equal(found["state"]["head.weight"]["exp_avg"], own.cpu())
    before = found["state"]["head.weight"]["exp_avg"].clone()
    step(model, optimizer, 1)
    assert torch.equal(found["state"]["head.weight"]["exp_avg"], before), "a copy, not an alias"


@pytest.mark.spec("OSD-08", "OSD-04")
@flat_or_original
@ranks(2)
def test_a_unit_that_was_never_used_has_no_state(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    model(torch.ones(2, 3, device=device()), skip=True).sum().backward()
    optimizer.step()
    found = FSDP.optim_state_dict(model, optimizer)
    assert {name for name in found["state"] if name.startswith("second")} == set()
    assert "first.0.weight" in found["state"]
    empty = torch.optim.Adam(model.parameters(), lr=0.01)
    assert FSDP.optim_state_dict(model, empty)["state"] == {}


@pytest.mark.spec("OSD-08")
@ranks(2)
def test_names_and_states_match_on_a_rank_without_elements_of_a_parameter() -> None:
    """With original parameters, the 1-element ``scale`` is on one rank, so the other rank's optimizer has no state."""
    model, optimizer = trained("adam", use_orig_params=True)
    scale = next(p for name, p in model.named_parameters() if name.endswith("scale"))
    holds = [None, None]
    dist.all_gather_object(holds, scale in optimizer.state)
    assert sorted(holds) == [False, True]
    found = FSDP.optim_state_dict(model, optimizer)["state"]["scale"]
    assert_same_state({"scale": found}, {"scale": single_process("adam")["scale"]}, bitwise=False)


@pytest.mark.spec("OSD-09", "SD-CFG-11")
@flat_or_original
@ranks(2)
def test_the_model_may_be_a_plain_module_or_ddp_around_units(keep: bool) -> None:
    plain = make()
    plain.first = FSDP(plain.first, use_orig_params=keep)
    plain.second = FSDP(plain.second, use_orig_params=keep)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    step(plain, optimizer, 0, everybody=True)
    found = FSDP.optim_state_dict(plain, optimizer)
    assert sorted(found["state"]) == sorted(name for name, _ in make().named_parameters())
    assert found["state"].keys() <= plain.state_dict().keys()
    assert_same_state(found["state"], single_process("adam", 1), bitwise=False)
    if not keep:
        around = DistributedDataParallel(plain, init_sync=False)
        optimizer = torch.optim.Adam(around.parameters(), lr=0.01)
        step(around, optimizer, 0)
        assert sorted(FSDP.optim_state_dict(around, optimizer)["state"]) == [
            f"module.{name}" for name in sorted(found["state"])
        ]


@pytest.mark.spec("OSD-09")
@ranks(4)
def test_a_model_on_a_group_of_its_own_needs_only_the_ranks_of_that_group() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    dist.barrier()
    if dist.get_rank() >= 2:
        model = wrapped(make(), process_group=mine)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step(model, optimizer, 0)
        with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
            for found in (
                FSDP.optim_state_dict(model, optimizer),
                FSDP.optim_state_dict(model, optimizer, group=mine),
            ):
                assert bool(found) is (dist.get_rank() == 2)
    dist.barrier()


@pytest.mark.spec("OSD-09", "OSD-05", "OSD-FULL-01", "HYB-10")
@flat_or_original
@ranks(4)
def test_rank0_only_with_a_given_group_gives_the_dict_to_the_first_rank_of_the_group(keep: bool) -> None:
    """Four ranks form a 2-D grid. With the group of a row or column, each row or column can write a separate file."""
    row, column = groups = grid()
    dist.barrier()
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}
    model, optimizer = trained("adam", 1, use_orig_params=keep, **hybrid)
    everywhere = FSDP.optim_state_dict(model, optimizer)["state"]
    FSDP.set_state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True))
    for group, who in ((None, [0]), (row, [0, 2]), (column, [0, 1])):
        with quiet():
            old = FSDP.full_optim_state_dict(model, optimizer, group=group)
        for found in (FSDP.optim_state_dict(model, optimizer, group=group), old):
            if dist.get_rank() in who:
                assert_same_state(found["state"], everywhere)
            else:
                assert found == {}
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found, group=group)
        assert_same_state(loadable["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("HYB-10", "OSD-04", "OSD-06")
@flat_or_original
@ranks(4)
def test_hybrid_optim_state_is_equal_and_sharded_in_group(keep: bool) -> None:
    groups = grid()
    dist.barrier()
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}
    model, optimizer = trained("adam", use_orig_params=keep, **hybrid)
    expected = single_process("adam")
    found = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(found["state"], expected, bitwise=False)
    with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        assert bool(FSDP.optim_state_dict(model, optimizer)) is (dist.get_rank() == 0)
    with FSDP.state_dict_type(model, SHARDED):
        rows = FSDP.optim_state_dict(model, optimizer)["state"]["first.0.weight"]["exp_avg"].local_shards()[0].tensor
    full = found["state"]["first.0.weight"]["exp_avg"]
    assert torch.equal(rows, full[slice(0, 3) if dist.get_rank() % 2 == 0 else slice(3, 5)])


@pytest.mark.spec("OSD-04", "OSD-08")
@flat_or_original
@ranks(2)
def test_optim_state_dict_of_no_shard_units_equals_a_single_process(keep: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep, sharding_strategy=ShardingStrategy.NO_SHARD)
    for form in (FULL, SHARDED):
        with FSDP.state_dict_type(model, form):
            found = FSDP.optim_state_dict(model, optimizer)
        assert_same_state(found["state"], single_process("adam"), bitwise=False)
        assert all(is_plain(value) for of in found["state"].values() for value in of.values())


@pytest.mark.spec("OSD-04", "OSD-08")
@ranks(2)
def test_factored_optimizer_state_needs_unsharded_parameters() -> None:
    """Adafactor keeps averages of the rows and columns of a matrix, but one value per element of a 1-D shard."""
    model = wrapped(make(), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    found = FSDP.optim_state_dict(model, optimizer)["state"]
    assert found["first.0.weight"]["row_var"].shape == (5, 1)
    sliced = wrapped(make())
    optimizer = torch.optim.Adafactor(sliced.parameters(), lr=0.01)
    step(sliced, optimizer, 0)
    found = FSDP.optim_state_dict(sliced, optimizer)["state"]
    assert found["first.0.weight"]["variance"].shape == (5, 3)


@pytest.mark.spec("OSD-04")
@flat_or_original
@ranks(2)
def test_low_precision_states_keep_their_dtype(keep: bool) -> None:
    """States in bfloat16 and float32: each is sent in its own dtype."""
    model, optimizer = trained("adam", 1, use_orig_params=keep)
    given = copy.deepcopy(optimizer.state_dict())
    for entries in given["state"].values():
        entries["exp_avg"] = entries["exp_avg"].bfloat16()
        entries["note"], entries["nothing"] = 2.5, None
    found = FSDP.optim_state_dict(model, optimizer, given)["state"]
    full = FSDP.optim_state_dict(model, optimizer)["state"]
    for name, entries in found.items():
        assert torch.equal(entries["exp_avg"], full[name]["exp_avg"].bfloat16())
        assert torch.equal(entries["exp_avg_sq"], full[name]["exp_avg_sq"])
        assert (entries["note"], entries["nothing"]) == (2.5, None)


@pytest.mark.spec("OSD-08", "OSD-LOAD-06")
@flat_or_original
@ranks(2)
def test_optimizer_with_names_lists_original_names(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    step(model, optimizer, 0)
    (group,) = FSDP.optim_state_dict(model, optimizer)["param_groups"]
    assert group["param_names"] == group["params"]
    assert sorted(group["params"]) == sorted(dict(make().named_parameters()))


@pytest.mark.spec("OSD-03")
@ranks(2)
def test_custom_keys_are_copied_with_a_warning_and_groups_may_be_missing() -> None:
    model, optimizer = trained("adam", 1)
    given = copy.deepcopy(optimizer.state_dict())
    given["state"]["schedule"] = torch.tensor(3.0)
    with pytest.warns(UserWarning, match="schedule"):
        found = FSDP.optim_state_dict(model, optimizer, given)
    assert found["state"]["schedule"] == 3.0
    del given["param_groups"], given["state"]["schedule"]
    assert list(FSDP.optim_state_dict(model, optimizer, given)) == ["state"]


@pytest.mark.spec("OSD-01", "OSD-08")
@flat_or_original
@ranks(2)
def test_incompatible_states_of_the_ranks_are_refused_on_all_ranks(keep: bool) -> None:
    model, optimizer = trained("adam", 1, use_orig_params=keep)
    rank = dist.get_rank()
    given = copy.deepcopy(optimizer.state_dict())
    if rank == 1:
        on_both = next(model.module.first.parameters())
        del given["state"][next(n for n, p in enumerate(model.parameters()) if p is on_both)]
    with pytest.raises(RuntimeError, match=rf"rank {rank}.*\n.*on rank\(s\) \[0\] and not on rank\(s\) \[1\]"):
        FSDP.optim_state_dict(model, optimizer, given)
    given = copy.deepcopy(optimizer.state_dict())
    if rank == 1:
        given["state"][min(given["state"])]["step"] += 1
    with pytest.raises(RuntimeError, match=r"'step'.*expected 1\.0 .*found 2\.0 \(torch.float32\) on rank 1"):
        FSDP.optim_state_dict(model, optimizer, given)
    assert FSDP.optim_state_dict(model, optimizer)["state"], "nobody waits for anybody"


@pytest.mark.spec("OSD-08")
@ranks(2)
def test_optimizer_from_before_wrapping_is_refused_on_all_ranks() -> None:
    model, right = trained("adam", 1)
    states = FSDP.optim_state_dict(model, right)
    optimizer = right
    if dist.get_rank() == 1:
        optimizer = torch.optim.Adam(make().parameters(), lr=0.01)
    for call in (
        lambda: FSDP.optim_state_dict(model, optimizer),
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, states),
    ):
        with pytest.raises(ValueError, match=r"rank 1: .*not parameters of the model.*after wrapping"):
            call()
    given = right.state_dict()
    if dist.get_rank() == 1:
        given["param_groups"][0]["params"].append(99)
    with pytest.raises(RuntimeError, match=r"rank 1: .*expected 3 parameters in its groups.*found 4"):
        FSDP.optim_state_dict(model, right, given)
    assert FSDP.optim_state_dict(model, right)["state"]


@pytest.mark.spec("OSD-01", "OSD-03")
@flat_or_original
@ranks(1)
def test_optim_state_dict_on_one_rank_equals_a_single_process(keep: bool) -> None:
    model, optimizer = trained("adam", use_orig_params=keep)
    for form in (FULL, SHARDED):
        with FSDP.state_dict_type(model, form):
            found = FSDP.optim_state_dict(model, optimizer)
        assert_same_state(found["state"], single_process("adam"))
