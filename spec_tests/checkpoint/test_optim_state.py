"""Saving optimizer states by original names, compared with a single process and, key by key, with torch's wrapper."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint.checkpoints import (
    FULL,
    LOCAL,
    OPTIMIZERS,
    SHARDED,
    assert_same_state,
    flat_or_original,
    gathered,
    in_torch,
    is_plain,
    make,
    quiet,
    single_process,
    step,
    trained,
    wrapped,
)
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import HYBRID_SHARD, NO_SHARD, grid
from spec_tests.subject import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP

TORCH = torch_fsdp.FullyShardedDataParallel
NAMES = ["first.0.bias", "first.0.weight", "head.bias", "head.weight", "scale", "second.0.bias", "second.0.weight"]


def as_torch(kind: str, **options: Any) -> tuple[torch_fsdp.FullyShardedDataParallel, Any]:
    """The model of `trained` in torch's wrapper."""
    model = in_torch(make(), **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    return model, optimizer


def shapes(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: (v.shape, v.dtype) for key, v in entries.items()} for name, entries in state.items()}


@pytest.mark.spec("OSD-01", "OSD-03", "OSD-04", "OSD-08")
@flat_or_original
@pytest.mark.parametrize("kind", ["adam", "adamw-amsgrad", "momentum", "sgd"])
@ranks(2)
def test_full_optim_state_dict_equals_that_of_a_single_process_and_of_torch(kind: str, keep: bool) -> None:
    found = FSDP.optim_state_dict(*trained(kind, use_orig_params=keep))
    assert sorted(found) == ["param_groups", "state"]
    # With original parameters, this includes `scale`, of which only one rank stores an element and has a state.
    assert_same_state(found["state"], single_process(kind), bitwise=False)
    with quiet():
        flat = TORCH.optim_state_dict(*as_torch(kind))
        theirs = TORCH.optim_state_dict(*as_torch(kind, use_orig_params=keep))
    assert found["param_groups"] == theirs["param_groups"]
    # Seen with torch 2.13 on the CPU and original parameters: all states of a parameter share one buffer and have the
    # values of the last. So that case compares only names and shapes. Values are compared with torch's flat parameters.
    assert shapes(found["state"]) == shapes(theirs["state"])
    assert_same_state(found["state"], flat["state"])


@pytest.mark.spec("OSD-01", "OSD-03")
@flat_or_original
@ranks(1)
def test_optim_state_dict_on_one_rank_equals_a_single_process(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    for form in (FULL, SHARDED):
        with FSDP.state_dict_type(model, form):
            assert_same_state(FSDP.optim_state_dict(model, optimizer)["state"], single_process())


@pytest.mark.spec("OSD-02", "OSD-03")
@flat_or_original
@ranks(2)
def test_a_dict_that_is_passed_is_translated_instead_of_the_optimizers_own(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    before = FSDP.optim_state_dict(model, optimizer)["state"]
    given = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 5)
    assert_same_state(FSDP.optim_state_dict(model, optimizer, given)["state"], before)
    assert FSDP.optim_state_dict(model, optimizer)["state"]["head.weight"]["step"] == 3
    given["state"]["schedule"] = torch.tensor(3.0)
    with pytest.warns(UserWarning, match="schedule"):
        found = FSDP.optim_state_dict(model, optimizer, given)
    assert found["state"]["schedule"] == 3.0
    del given["param_groups"], given["state"]["schedule"]
    assert list(FSDP.optim_state_dict(model, optimizer, given)) == ["state"]


@pytest.mark.spec("OSD-06", "OSD-10")
@pytest.mark.parametrize("use_dtensor", [False, True])
@flat_or_original
@ranks(2)
def test_sharded_optim_state_has_the_row_shards_of_torch_and_plain_steps(keep: bool, use_dtensor: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    configs = (
        ShardedStateDictConfig(offload_to_cpu=True, _use_dtensor=use_dtensor),
        ShardedOptimStateDictConfig(offload_to_cpu=True, _use_dtensor=use_dtensor),
    )
    with FSDP.state_dict_type(model, SHARDED, *configs):
        found = FSDP.optim_state_dict(model, optimizer)["state"]
        weights = model.state_dict()
    kind = DTensor if use_dtensor else ShardedTensor
    for name, entries in found.items():
        assert isinstance(weights[name], kind)
        assert is_plain(entries["step"])
        assert isinstance(entries["exp_avg"], kind)
        assert torch.equal(gathered(entries["exp_avg"]).cpu(), full["state"][name]["exp_avg"])
    if use_dtensor:
        return
    if dist.get_rank() == 0:
        assert tuple(shards_of(found["first.0.weight"]["exp_avg"])[0][1].shape) == (3, 3), "3 of 5 rows"
    other, theirs = as_torch("adam", use_orig_params=keep)
    with quiet(), TORCH.state_dict_type(other, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
        expected = TORCH.optim_state_dict(other, theirs)["state"]
    assert found.keys() == expected.keys()
    for name, entries in expected.items():
        for key, value in entries.items():
            if isinstance(value, ShardedTensor):
                # If a rank stores no rows, minifsdp has an empty shard on it, and torch has no shard.
                mine = [(offsets, rows) for offsets, rows in shards_of(found[name][key]) if rows.numel()]
                assert [o for o, _ in mine] == [o for o, _ in shards_of(value)]
                assert all(torch.equal(a, b.cpu()) for (_, a), (_, b) in zip(mine, shards_of(value), strict=True))
            else:
                assert torch.equal(found[name][key], value)


def shards_of(value: ShardedTensor) -> list[tuple[Any, torch.Tensor]]:
    return [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]


@pytest.mark.spec("OSD-07")
@pytest.mark.parametrize("offload", [False, True])
@flat_or_original
@ranks(2)
def test_the_local_type_gives_the_sharded_form_of_optimizer_states_as_in_torch(keep: bool, offload: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    other, theirs = as_torch("adam", use_orig_params=keep)
    with FSDP.state_dict_type(model, SHARDED, None, ShardedOptimStateDictConfig(offload_to_cpu=offload)):
        expected = FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, LOCAL, None, LocalOptimStateDictConfig(offload_to_cpu=offload)):
        found = FSDP.optim_state_dict(model, optimizer)
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found)
    with quiet(), TORCH.state_dict_type(other, torch_fsdp.StateDictType.LOCAL_STATE_DICT):
        in_torch_too = TORCH.optim_state_dict(other, theirs)["state"]
    assert {name: {key: type(value) for key, value in of.items()} for name, of in found["state"].items()} == {
        name: {key: type(value) for key, value in of.items()} for name, of in in_torch_too.items()
    }
    for name, of in expected["state"].items():
        ours, rows = (shards_of(one["state"][name]["exp_avg"])[0][1] for one in (found, expected))
        assert torch.equal(ours, rows)
        assert ours.device == rows.device
        assert torch.equal(of["step"], found["state"][name]["step"])
    assert_same_state(loadable["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-09", "SD-CFG-11")
@flat_or_original
@ranks(2)
def test_the_model_may_be_a_plain_module_or_ddp_around_units(keep: bool) -> None:
    plain = make()
    plain.first = FSDP(plain.first, use_orig_params=keep)
    plain.second = FSDP(plain.second, use_orig_params=keep)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    step(plain, optimizer, 0, all_ranks=True)
    found = FSDP.optim_state_dict(plain, optimizer)["state"]
    assert found.keys() <= plain.state_dict().keys()
    assert_same_state(found, single_process(steps=1), bitwise=False)
    if not keep:
        around = DistributedDataParallel(plain, init_sync=False)
        optimizer = torch.optim.Adam(around.parameters(), lr=0.01)
        step(around, optimizer, 0)
        assert sorted(FSDP.optim_state_dict(around, optimizer)["state"]) == [f"module.{name}" for name in NAMES]


@pytest.mark.spec("OSD-09")
@ranks(4)
def test_a_model_on_a_group_of_its_own_needs_only_the_ranks_of_that_group() -> None:
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    dist.barrier()
    if dist.get_rank() >= 2:
        model, optimizer = trained(steps=1, process_group=mine)
        with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
            for group in (None, mine):
                assert bool(FSDP.optim_state_dict(model, optimizer, group=group)) is (dist.get_rank() == 2)
    dist.barrier()


@pytest.mark.spec("OSD-04", "OSD-05", "OSD-06", "OSD-09", "OSD-FULL-01", "OSD-LOAD-05", "HYB-10")
@flat_or_original
@ranks(4)
def test_hybrid_optim_state_is_equal_on_all_replicas_and_loads_in_each_type(keep: bool) -> None:
    """Four ranks form a 2-D grid. With the group of a row or column, each row or column can write a separate file."""
    row, column = groups = grid()
    dist.barrier()
    hybrid = {"sharding_strategy": HYBRID_SHARD, "process_group": groups, "use_orig_params": keep}
    model, optimizer = trained(**hybrid)
    own, full = optimizer.state_dict()["state"], FSDP.optim_state_dict(model, optimizer)["state"]
    assert_same_state(full, single_process(), bitwise=False)
    assert {value.device.type for entries in full.values() for value in entries.values()} == {"cpu"}
    with FSDP.state_dict_type(model, SHARDED):
        rows = shards_of(FSDP.optim_state_dict(model, optimizer)["state"]["first.0.weight"]["exp_avg"])[0][1]
    expected = full["first.0.weight"]["exp_avg"][slice(0, 3) if dist.get_rank() % 2 == 0 else slice(3, 5)]
    assert torch.equal(rows.cpu(), expected)
    rank0_only = FullOptimStateDictConfig(rank0_only=True)
    for form, config in [(FULL, None), (SHARDED, None), (FULL, rank0_only)]:
        again, restored = trained(steps=0, **hybrid)
        for either in (model, again):
            FSDP.set_state_dict_type(either, form, None, config)
        states = FSDP.optim_state_dict(model, optimizer)
        assert_same_state(FSDP.optim_state_dict_to_load(again, restored, states)["state"], own)
    for group, writers in ((None, [0]), (row, [0, 2]), (column, [0, 1])):
        with quiet():
            older = FSDP.full_optim_state_dict(model, optimizer, group=group)
        for found in (FSDP.optim_state_dict(model, optimizer, group=group), older):
            if dist.get_rank() in writers:
                assert_same_state(found["state"], full)
            else:
                assert found == {}
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found, group=group)
        assert_same_state(loadable["state"], own)


@pytest.mark.spec("OSD-04", "OSD-08", "OSD-LOAD-05")
@pytest.mark.parametrize("kind", ["adam", "adafactor"])
@flat_or_original
@ranks(2)
def test_states_of_no_shard_units_equal_those_of_a_single_process_and_load_again(keep: bool, kind: str) -> None:
    """Adafactor stores averages of the rows and columns of a matrix, but one value per element of a 1-D parameter."""
    model, optimizer = trained(kind, use_orig_params=keep, sharding_strategy=NO_SHARD)
    own = copy.deepcopy(optimizer.state_dict()["state"])
    for form, config in ((FULL, FullOptimStateDictConfig(rank0_only=True)), (FULL, None), (SHARDED, None)):
        with FSDP.state_dict_type(model, form, None, config):
            found = FSDP.optim_state_dict(model, optimizer)
            assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, found)["state"], own)
        if not found:
            continue
        assert all(is_plain(value) for entries in found["state"].values() for value in entries.values())
        if keep or kind == "adam":
            assert_same_state(found["state"], single_process(kind), bitwise=False)
        else:
            assert found["state"]["first.0.weight"]["variance"].shape == (5, 3)


@pytest.mark.spec("OSD-08", "OSD-LOAD-06")
@flat_or_original
@ranks(2)
def test_optimizer_with_names_lists_original_names(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    step(model, optimizer, 0)
    states = FSDP.optim_state_dict(model, optimizer)
    (group,) = states["param_groups"]
    assert group["param_names"] == group["params"]
    assert sorted(group["params"]) == NAMES
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, states)
    assert loadable["param_groups"] == optimizer.state_dict()["param_groups"], "with the optimizer's own names"


@pytest.mark.spec("OSD-01", "OSD-08")
@flat_or_original
@ranks(2)
def test_states_that_differ_between_the_ranks_are_refused_on_all_ranks(keep: bool) -> None:
    model, optimizer = trained(steps=1, use_orig_params=keep)
    parameters = list(model.parameters())
    on_both = next(number for number, p in enumerate(parameters) if p is next(model.module.first.parameters()))

    def refused(change: Any, match: str) -> None:
        given = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == 1:
            change(given)
        with pytest.raises(RuntimeError, match=match):
            FSDP.optim_state_dict(model, optimizer, given)

    def of_each_parameter(change: Any) -> Any:
        return lambda given: [change(entries) for entries in given["state"].values()]

    refused(
        lambda given: given["state"].pop(on_both),
        rf"rank {dist.get_rank()}.*\n.*on rank\(s\) \[0\] and not on rank\(s\) \[1\]",
    )
    refused(
        of_each_parameter(lambda entries: entries["step"].add_(1)),
        r"'step'.*expected 1\.0 .*found 2\.0 \(torch.float32\) on rank 1",
    )
    refused(
        of_each_parameter(lambda entries: entries.update(exp_avg_sq=entries["exp_avg_sq"].double())),
        r"'exp_avg_sq' of 'first\.0\.weight': expected.*torch.float32\) as on rank 0, found.*torch.float64\) on rank 1",
    )
    refused(
        lambda given: given["param_groups"][0]["params"].append(99),
        rf"rank 1: .*expected {len(parameters)} parameters in its groups.*found {len(parameters) + 1}",
    )
    for entries in optimizer.state.values():
        entries["factors"] = [torch.ones(2)]
    refused(
        of_each_parameter(lambda entries: entries.update(factors=[torch.ones(2, dtype=torch.float64)])),
        r"optimizer state 'factors' of 'first\.0\.weight': expected .* on rank 1",
    )
    refused(
        of_each_parameter(lambda entries: entries["factors"].append(torch.ones(2))),
        r"optimizer state 'factors' of 'first\.0\.weight': expected .* on rank 1",
    )
    assert FSDP.optim_state_dict(model, optimizer)["state"], "no rank waits"


@pytest.mark.spec("OSD-08")
@ranks(2)
def test_optimizer_from_before_wrapping_is_refused_on_all_ranks() -> None:
    model, right = trained(steps=1)
    states = FSDP.optim_state_dict(model, right)
    optimizer = torch.optim.Adam(make().parameters(), lr=0.01) if dist.get_rank() == 1 else right
    for call in (
        lambda: FSDP.optim_state_dict(model, optimizer),
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, states),
    ):
        with pytest.raises(ValueError, match=r"rank 1: .*not parameters of the model.*after wrapping"):
            call()
    assert FSDP.optim_state_dict(model, right)["state"]


@pytest.mark.spec("OSD-08")
@pytest.mark.parametrize("keep", [False, True])
@ranks(2)
def test_a_state_may_be_a_container_of_tensors(keep: bool) -> None:
    model = FSDP(torch.nn.Linear(2, 2).to(device()), use_orig_params=keep, device_id=device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2, device=device())).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        state["history"] = deque([torch.ones(2, device=parameter.device)], maxlen=3)
    found = FSDP.optim_state_dict(model, optimizer)["state"]
    histories = [state["history"] for state in found.values() if "history" in state]
    assert histories
    assert all(list(map(torch.Tensor.tolist, history)) == [[1.0, 1.0]] for history in histories)
