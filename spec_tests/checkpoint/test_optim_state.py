"""Optimizer states are saved by original names, in each form, with the values of a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid

FSDP = subject.FullyShardedDataParallel
FULL_SHARD, _, NO_SHARD, HYBRID_SHARD, _ = subject.ShardingStrategy
NAMES = ["first.0.bias", "first.0.weight", "head.bias", "head.weight", "scale", "second.0.bias", "second.0.weight"]
# By form, the class of the saved moments. The local form has the classes of the sharded one, as in torch.
CLASSES = {"full": Tensor, "rank 0": Tensor, "sharded": ShardedTensor, "dtensor": DTensor, "local": ShardedTensor}
each_form = pytest.mark.parametrize("form", CLASSES)


def full_states(states: dict[str, Any]) -> dict[str, Any]:
    """The states by name, with full tensors. Every rank must call it."""
    named = states["state"].items()
    return {name: {key: checkpoints.gathered(value) for key, value in entries.items()} for name, entries in named}


def single_process(kind: str = "adam", steps: int = 2) -> dict[str, dict[str, Any]]:
    """Optimizer states of the plain model by name, trained on the batches of all ranks."""
    model = checkpoints.make()
    optimizer = checkpoints.OPTIMIZERS[kind](model.parameters())
    checkpoints.train(model, optimizer, range(steps), range(dist.get_world_size()))
    names = [name for name, _ in model.named_parameters()]
    return {names[key]: entries for key, entries in optimizer.state_dict()["state"].items()}


@pytest.mark.spec("OSD-01", "OSD-03", "OSD-04", "OSD-05", "OSD-06", "OSD-07", "OSD-08", "OSD-10", "OSD-LOAD-01")
@pytest.mark.spec("OSD-LOAD-05")
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, FULL_SHARD) for kind in ("adam", "adamw-amsgrad", "momentum", "sgd")),
        ("adam", NO_SHARD),
        # Adafactor stores averages of the rows and columns of a matrix.
        ("adafactor", NO_SHARD),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
@each_form
@checkpoints.flat_or_original
@ranks(2)
def test_states_are_those_of_a_single_process(keep: bool, form: str, offload: bool, kind: str, strategy: Any) -> None:
    model, optimizer = checkpoints.trained(kind, use_orig_params=keep, sharding_strategy=strategy)
    own = copy.deepcopy(optimizer.state_dict()["state"])
    checkpoints.set_form(model, form, offload_to_cpu=offload)
    states = FSDP.optim_state_dict(model, optimizer)
    checkpoints.assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, states)["state"], own)
    if form == "rank 0" and dist.get_rank() == 1:
        assert states == {}
        return
    assert sorted(states["param_groups"][0]["params"]) == NAMES
    for entries in states["state"].values():
        # SGD without momentum has None.
        for value in (value for value in entries.values() if value is not None and value.dim()):
            local_part = checkpoints.local_part(value)
            assert local_part.device.type == ("cpu" if offload else device().type)
            # A unit that is not sharded has plain values.
            assert isinstance(value, CLASSES[form] if strategy is FULL_SHARD else Tensor)
            if form in ("sharded", "dtensor") and strategy is FULL_SHARD and value.size()[0] == 5:
                assert len(local_part) == 3 - dist.get_rank()
    if form != "rank 0" and (keep or kind != "adafactor"):
        checkpoints.assert_same_state(full_states(states), single_process(kind), bitwise=False)


@pytest.mark.spec("OSD-02", "OSD-03")
@checkpoints.flat_or_original
@ranks(2)
def test_a_dict_that_is_passed_is_translated_instead_of_the_optimizers_own(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    before = FSDP.optim_state_dict(model, optimizer)["state"]
    given = copy.deepcopy(optimizer.state_dict())
    checkpoints.train(model, optimizer, [5])
    checkpoints.assert_same_state(FSDP.optim_state_dict(model, optimizer, given)["state"], before)
    assert FSDP.optim_state_dict(model, optimizer)["state"]["head.weight"]["step"] == 3
    given["state"]["schedule"] = torch.tensor(3.0)
    with pytest.warns(UserWarning, match="schedule"):
        found = FSDP.optim_state_dict(model, optimizer, given)
    assert found["state"]["schedule"] == 3.0
    del given["param_groups"], given["state"]["schedule"]
    assert list(FSDP.optim_state_dict(model, optimizer, given)) == ["state"]


@pytest.mark.spec("OSD-09", "SD-CFG-11")
@checkpoints.flat_or_original
@ranks(2)
def test_the_model_may_be_a_plain_module_or_ddp_around_units(keep: bool) -> None:
    plain = checkpoints.make()
    plain.first = FSDP(plain.first, use_orig_params=keep)
    plain.second = FSDP(plain.second, use_orig_params=keep)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    checkpoints.train(plain, optimizer, [0], ranks=[0, 1])
    found = FSDP.optim_state_dict(plain, optimizer)["state"]
    assert found.keys() <= plain.state_dict().keys()
    checkpoints.assert_same_state(found, single_process(steps=1), bitwise=False)
    if not keep:
        around = DistributedDataParallel(plain, init_sync=False)
        optimizer = torch.optim.Adam(around.parameters(), lr=0.01)
        checkpoints.train(around, optimizer, [0])
        assert sorted(FSDP.optim_state_dict(around, optimizer)["state"]) == [f"module.{name}" for name in NAMES]


@pytest.mark.spec("OSD-09")
@ranks(4)
def test_a_model_on_a_group_of_its_own_needs_only_the_ranks_of_that_group() -> None:
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    dist.barrier()
    if dist.get_rank() >= 2:
        model, optimizer = checkpoints.trained(steps=1, process_group=mine)
        checkpoints.set_form(model, "rank 0")
        for group in (None, mine):
            assert bool(FSDP.optim_state_dict(model, optimizer, group=group)) is (dist.get_rank() == 2)
    dist.barrier()


@pytest.mark.spec("OSD-04", "OSD-05", "OSD-06", "OSD-09", "OSD-FULL-01", "OSD-LOAD-05", "HYB-10")
@checkpoints.flat_or_original
@ranks(4)
def test_hybrid_optim_state_is_equal_on_all_replicas_and_loads_in_each_type(keep: bool) -> None:
    """Four ranks form a 2-D grid. With the group of a row or column, each row or column can write a separate file."""
    row, column = groups = grid()
    hybrid = {"sharding_strategy": HYBRID_SHARD, "process_group": groups, "use_orig_params": keep}
    model, optimizer = checkpoints.trained(**hybrid)
    own, full = optimizer.state_dict()["state"], FSDP.optim_state_dict(model, optimizer)["state"]
    checkpoints.assert_same_state(full, single_process(), bitwise=False)
    checkpoints.set_form(model, "sharded")
    states = FSDP.optim_state_dict(model, optimizer)
    checkpoints.assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, states)["state"], own)
    rows = checkpoints.local_part(states["state"]["first.0.weight"]["exp_avg"])
    expected = full["first.0.weight"]["exp_avg"][slice(0, 3) if dist.get_rank() % 2 == 0 else slice(3, 5)]
    assert torch.equal(rows, expected)
    checkpoints.set_form(model, "rank 0")
    for group, writers in ((None, [0]), (row, [0, 2]), (column, [0, 1])):
        with checkpoints.quiet():
            older = FSDP.full_optim_state_dict(model, optimizer, group=group)
        for found in (FSDP.optim_state_dict(model, optimizer, group=group), older):
            if dist.get_rank() in writers:
                checkpoints.assert_same_state(found["state"], full)
            else:
                assert found == {}
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found, group=group)
        checkpoints.assert_same_state(loadable["state"], own)
    dist.barrier()


@pytest.mark.spec("OSD-08", "OSD-LOAD-06")
@checkpoints.flat_or_original
@ranks(2)
def test_optimizer_with_names_lists_original_names(keep: bool) -> None:
    model = checkpoints.wrapped(checkpoints.make(), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    checkpoints.train(model, optimizer, [0])
    states = FSDP.optim_state_dict(model, optimizer)
    (group,) = states["param_groups"]
    assert group["param_names"] == group["params"]
    assert sorted(group["params"]) == NAMES
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, states)
    assert loadable["param_groups"] == optimizer.state_dict()["param_groups"], "with the optimizer's own names"


# --- kinds of states ---


def set_every_dtype(name: str, entries: dict[str, Any]) -> None:
    entries.update(
        exp_avg=entries["exp_avg"].bfloat16(),
        # float32 cannot represent this value.
        double=torch.tensor(1 / 3, dtype=torch.float64),
        whole=torch.tensor(3, dtype=torch.int32),
        truth=torch.tensor(True),
        complex=torch.tensor(1 + 2j, dtype=torch.complex64),
        note=2.5,
        nothing=None,
    )


def set_two_dtypes(name: str, entries: dict[str, Any]) -> None:
    """The states of the weights have a value that bfloat16 cannot represent. Only original parameters may differ."""
    dtype = torch.bfloat16 if name.endswith("bias") else torch.float32
    entries["exp_avg"] = torch.full_like(entries["exp_avg"], 1 / 3, dtype=dtype)


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-08", "OSD-LOAD-01")
@pytest.mark.parametrize(
    ("keep", "change"), [(False, set_every_dtype), (True, set_every_dtype), (True, set_two_dtypes)]
)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@each_form
@ranks(2)
def test_state_keeps_its_dtype_when_saved_and_loaded(form: str, strategy: Any, keep: bool, change: Any) -> None:
    model, optimizer = checkpoints.trained(steps=1, use_orig_params=keep, sharding_strategy=strategy)
    expected = FSDP.optim_state_dict(model, optimizer)["state"]
    given = copy.deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    for number, entries in given["state"].items():
        change(names[number], entries)
    for name, entries in expected.items():
        change(name, entries)
    checkpoints.set_form(model, form)
    states = FSDP.optim_state_dict(model, optimizer, given)
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, states)
    checkpoints.assert_same_state(loadable["state"], given["state"])
    if form != "rank 0":
        checkpoints.assert_same_state(full_states(states), expected)
    if change is set_two_dtypes and strategy is FULL_SHARD:
        flat, of_flat = checkpoints.trained(steps=1)
        checkpoints.set_form(flat, form)
        with pytest.raises(RuntimeError, match=r"'exp_avg': a flat parameter stores it only once"):
            FSDP.optim_state_dict_to_load(flat, of_flat, states)


# --- refusals ---


ON_RANK_1 = r"optimizer state 'factors' of 'first\.0\.weight': expected .* on rank 1"
TWO_DTYPES = r"'exp_avg_sq' of 'first\.0\.weight': expected.*float32\) as on rank 0, found.*float64\) on rank 1"
# A change of the dict on rank 1, or of its states of one parameter, and the message on all ranks.
DIFFERENCES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "step": (lambda given, one: one["step"].add_(1), r"'step'.*expected 1\.0 .*found 2\.0 .* on rank 1"),
    "dtype": (lambda given, one: one.update(exp_avg_sq=one["exp_avg_sq"].double()), TWO_DTYPES),
    "dtype in a list": (lambda given, one: one.update(factors=[torch.ones(2).double()]), ON_RANK_1),
    "length of a list": (lambda given, one: one["factors"].append(torch.ones(2)), ON_RANK_1),
    "no state": (lambda given, one: given["state"].clear(), r"on rank\(s\) \[0\] and not on rank\(s\) \[1\]"),
    "parameter": (lambda given, one: given["param_groups"][0]["params"].append(99), r"rank 1: .*expected \d param"),
}


@pytest.mark.spec("OSD-01", "OSD-08")
@pytest.mark.parametrize("difference", DIFFERENCES)
@checkpoints.flat_or_original
@ranks(2)
def test_states_that_differ_between_the_ranks_are_refused_on_all_ranks(keep: bool, difference: str) -> None:
    model, optimizer = checkpoints.trained(steps=1, use_orig_params=keep)
    for entries in optimizer.state.values():
        entries["factors"] = [torch.ones(2)]
    given = copy.deepcopy(optimizer.state_dict())
    change, message = DIFFERENCES[difference]
    if dist.get_rank() == 1:
        for entries in [*given["state"].values()]:
            change(given, entries)
    with pytest.raises(RuntimeError, match=message) as caught:
        FSDP.optim_state_dict(model, optimizer, given)
    assert f"rank {dist.get_rank()}" in str(caught.value)
    assert FSDP.optim_state_dict(model, optimizer)["state"], "no rank waits"


@pytest.mark.spec("OSD-08")
@ranks(2)
def test_optimizer_from_before_wrapping_is_refused_on_all_ranks() -> None:
    model, right = checkpoints.trained(steps=1)
    states = FSDP.optim_state_dict(model, right)
    optimizer = torch.optim.Adam(checkpoints.make().parameters(), lr=0.01) if dist.get_rank() == 1 else right
    message = r"rank 1: .*not parameters of the model.*after wrapping"
    with pytest.raises(ValueError, match=message):
        FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=message):
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    assert FSDP.optim_state_dict(model, right)["state"]
