"""State dicts that do not fit, and calls that only some ranks make.

If a dict does not fit on one rank, all ranks must refuse it; otherwise the others would wait, or train with a different
model. A refusal must not change anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minifsdp.checks import agreement
from minifsdp.checks.collective_log import log
from minifsdp.engine.mesh import Group
from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.harness import device, rank_among_fake_ranks, ranks
from spec_tests.models.sharding import grid

FSDP = subject.FullyShardedDataParallel


def model_of(keep: bool, form: str = "full", seed: int = 0) -> FSDP:
    """A unit, next to a layer with buffers, an ignored layer and a plain buffer."""
    torch.manual_seed(seed)
    plain: Any = nn.Module()
    plain.net, plain.norm, plain.plain = checkpoints.make(seed), nn.BatchNorm1d(2), nn.Linear(2, 2)
    plain.register_buffer("table", torch.arange(3.0))
    model = checkpoints.wrapped(plain.to(device()), ignored_states=[plain.plain], use_orig_params=keep)
    checkpoints.set_form(model, form)
    return model


@contextmanager
def refused(model: FSDP, *parts: str) -> Iterator[None]:
    """Checks that the block raises an error with ``parts`` on each rank, and changes no value of the model."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=r"the state dict is refused on every rank") as caught:
        yield
    assert str(caught.value).startswith(f"rank {dist.get_rank()}: Error(s) in loading state_dict for ")
    for part in parts:
        assert part in str(caught.value)
    assert all(map(torch.equal, tensors, before))
    dist.barrier()


REMEDY = "call set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
BIAS = "net.first.0.bias"
# The form, a change of the dict on rank 1, and the message on all ranks.
MISFITS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("full", lambda s: s.pop(BIAS), f'Missing key(s) in state_dict: "{BIAS}"; expected a tensor of shape (5,), found'),
    ("full", lambda s: s.pop("norm.running_mean"), 'Missing key(s) in state_dict: "norm.running_mean"'),
    ("full", lambda s: s.pop("plain.weight"), 'Missing key(s) in state_dict: "plain.weight"'),
    ("full", lambda s: s.update(nobody=torch.ones(1)), 'Unexpected key(s) in state_dict: "nobody"'),
    ("full", lambda s: s.update({BIAS: torch.ones(2)}), f"mismatch for {BIAS}: expected shape (5,), found (2,)"),
    ("full", lambda s: s.update(table=torch.ones(4)), "size mismatch for table: expected shape (3,), found (4,)"),
    ("full", lambda s: s.update({"net.scale": 3}), "net.scale: expected a tensor, found a int"),
    ("full", lambda s: s.clear(), "and 4 more"),
    ("sharded", lambda s: s.update({BIAS: s["net.head.bias"]}), f"size mismatch for {BIAS}: expected shape (5,)"),
    ("sharded", lambda s: s.pop("net.head.bias"), 'Missing key(s) in state_dict: "net.head.bias"'),
]


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "SD-FULL-13", "SD-SHARD-03")
@pytest.mark.parametrize("case", range(len(MISFITS)))
@checkpoints.flat_or_original
@ranks(2)
def test_a_dict_that_does_not_fit_on_rank_1_is_refused_on_all(keep: bool, case: int) -> None:
    form, change, message = MISFITS[case]
    model, state = model_of(keep, form), dict(model_of(keep, form, seed=3).state_dict())
    if dist.get_rank() == 1:
        change(state)
    with refused(model, "rank 1: ", message):
        model.load_state_dict(state)
    assert model.load_state_dict(model.state_dict()) == ([], []), "no rank waits"


@pytest.mark.spec("SD-FULL-13")
@checkpoints.flat_or_original
@ranks(2)
def test_non_strict_load_returns_key_differences(keep: bool) -> None:
    model, other = model_of(keep), model_of(keep, seed=3).state_dict()
    missing = [BIAS, "net.scale", "norm.num_batches_tracked"]
    for name in missing:
        del other[name]
    other["nobody"] = torch.ones(1)
    result = model.load_state_dict(other, strict=False)
    assert sorted(result.missing_keys) == missing
    assert result.unexpected_keys == ["nobody"]
    with refused(model, "size mismatch for table"):
        model.load_state_dict({**other, "table": torch.ones(4)}, strict=False)
    # Old checkpoints store a 0-dimensional tensor as a tensor of one element.
    model.load_state_dict({"norm.num_batches_tracked": torch.tensor([7])}, strict=False)
    assert model.state_dict()["norm.num_batches_tracked"] == 7
    # A key may be missing on all ranks, but not on one.
    for form in ("full", "sharded"):
        checkpoints.set_form(model, form)
        state = dict(model.state_dict())
        if dist.get_rank() == 1:
            del state["net.head.bias"]
        with refused(model, "rank 1: net.head.bias: expected a shard, as on other ranks, found none"):
            model.load_state_dict(state, strict=False)


@pytest.mark.spec("SD-SHARD-03", "SD-SHARD-04", "SD-LOCAL-04", "OSD-LOAD-01", "OSD-LOAD-08")
@pytest.mark.parametrize("form", ["sharded", "dtensor", "local"])
@checkpoints.flat_or_original
@ranks(4)
def test_shards_of_another_number_of_ranks_are_refused(keep: bool, form: str) -> None:
    """The global shapes of these shards are correct, but their concatenation over four ranks is a different tensor."""
    of_four, optimizer = checkpoints.trained(steps=1, seed=3, use_orig_params=keep)
    of_two, fresh = checkpoints.trained(steps=0, use_orig_params=keep, process_group=grid()[0])
    for model in (of_four, of_two):
        checkpoints.set_form(model, form)
    rows = 2 if dist.get_rank() < 2 else 1
    found = f"on this rank, found ({rows}, 3); a sharded state dict must be loaded by as many ranks as saved it"
    parts = ["first.flat_param has 5 elements", "this rank stores 10"] if form == "local" else ["first.0.weight", found]
    with refused(of_two, *parts):
        of_two.load_state_dict(of_four.state_dict())
    if form != "local":
        states = FSDP.optim_state_dict(of_four, optimizer)
        with pytest.raises(RuntimeError, match=r"expected a shard of shape .* on this rank, found"):
            FSDP.optim_state_dict_to_load(of_two, fresh, states)


@pytest.mark.spec("SD-LOCAL-04")
@checkpoints.flat_or_original
@ranks(2)
def test_a_local_dict_of_other_units_or_another_dtype_is_refused(keep: bool) -> None:
    model = checkpoints.wrapped(checkpoints.make(), use_orig_params=keep)
    by_linear = subject.ModuleWrapPolicy({nn.Linear})
    other_units = checkpoints.wrapped(checkpoints.make(), use_orig_params=keep, auto_wrap_policy=by_linear)
    of_double = checkpoints.wrapped(checkpoints.make().double(), use_orig_params=keep)
    for each in (model, other_units, of_double):
        checkpoints.set_form(each, "local")
    with refused(other_units, 'Missing key(s) in state_dict: "first.0.flat_param"'):
        other_units.load_state_dict(model.state_dict())
    with refused(of_double, "elements (torch.float32), but this rank stores", "(torch.float64)"):
        of_double.load_state_dict(model.state_dict())


@pytest.mark.spec("SD-SHARD-03")
@pytest.mark.parametrize("wrong", ["shape", "order of ranks", "replicated", "columns"])
@checkpoints.flat_or_original
@ranks(2)
def test_dtensor_with_wrong_sharding_is_refused_with_remedy(keep: bool, wrong: str) -> None:
    model, rank, name = model_of(keep, "dtensor"), dist.get_rank(), "net.head.weight"
    mesh, turned = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    full = checkpoints.make().head.weight.detach().cpu()
    expected_row = f"{name}: expected a shard that starts at row {rank} on this rank, found one that starts at row"
    by_shape = f"{name}: expected a shard of shape (1, 5) on this rank, found"
    value, mesh, placement, *parts = {
        "shape": (torch.ones(6, 5), mesh, Shard(0), "expected shape (2, 5), found (6, 5)", "build the model with the"),
        "order of ranks": (full, turned, Shard(0), f"{expected_row} {1 - rank}", "use torch.distributed.checkpoint"),
        "replicated": (full, mesh, Replicate(), f"{by_shape} (2, 5)", "(Replicate(),)"),
        "columns": (full, mesh, Shard(1), f"{by_shape} (2, ", "(Shard(dim=1),)"),
    }[wrong]
    state = model.state_dict()
    with refused(model, *parts):
        model.load_state_dict({**state, name: distribute_tensor(value, mesh, [placement], src_data_rank=None)})
    # A single full value among shards is accepted, because a unit that was not sharded also has full values.
    assert not model.load_state_dict({**state, name: full}).missing_keys


@pytest.mark.spec("SD-CFG-08", "SD-FULL-09")
@pytest.mark.parametrize(
    ("chosen", "given", "message"),
    [
        ("full", "sharded", f"expected a full tensor, found a ShardedTensor; {REMEDY}"),
        ("sharded", "full", "expected a ShardedTensor or DTensor, found a full tensor"),
        ("full", "local", 'Missing key(s) in state_dict: "net.'),
        ("sharded", "local", 'Missing key(s) in state_dict: "net.'),
        ("local", "full", 'Missing key(s) in state_dict: "flat_param"; expected a local shard of'),
    ],
)
@checkpoints.flat_or_original
@ranks(2)
def test_a_dict_of_another_form_is_refused(keep: bool, chosen: str, given: str, message: str) -> None:
    model, state = model_of(keep, chosen), model_of(keep, given).state_dict()
    with refused(model, message):
        model.load_state_dict(state)


@pytest.mark.spec("SD-CFG-11", "SD-FULL-13")
@checkpoints.flat_or_original
@ranks(2)
def test_a_unit_in_a_plain_module_refuses_before_it_is_overwritten(keep: bool) -> None:
    plain = nn.ModuleDict({"net": checkpoints.wrapped(checkpoints.make(), use_orig_params=keep)})
    other = nn.ModuleDict({"net": checkpoints.make(3)}).state_dict()
    wrong = {**other, "net.head.weight": torch.ones(5, 2)} if dist.get_rank() == 1 else other
    with refused(plain["net"], "rank 1: size mismatch for net.head.weight"):
        plain.load_state_dict(wrong)
    # The plain module checks the keys, as usual. A strict load of the unit does not affect its later loads.
    without_scale = {name: value for name, value in other.items() if name != "net.scale"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.scale"'):
        plain.load_state_dict(without_scale)
    plain["net"].load_state_dict(plain["net"].state_dict())
    assert plain.load_state_dict(without_scale, strict=False).missing_keys == ["net.scale"]
    assert torch.equal(plain.state_dict()["net.head.weight"], other["net.head.weight"])


@pytest.mark.spec("SD-FULL-03", "OSD-FULL-02")
@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "optim_state_dict", "optim_state_dict_to_load"])
@ranks(2)
def test_call_on_one_rank_times_out_with_its_name_and_the_missing_ranks(name: str) -> None:
    group = dist.new_group([0, 1])
    model, optimizer = checkpoints.trained(steps=0, process_group=group)
    state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(state),
        "optim_state_dict": lambda: FSDP.optim_state_dict(model, optimizer),
        "optim_state_dict_to_load": lambda: FSDP.optim_state_dict_to_load(model, optimizer, states),
    }
    caller = [*calls].index(name) % 2
    group.set_timeout(timedelta(seconds=0.2))
    dist.barrier()
    if dist.get_rank() == caller:
        start = time.perf_counter()
        by_all = rf"rank {caller}: {name}\(\) must be called by all of the ranks \[0, 1\]"
        with pytest.raises(RuntimeError, match=by_all) as caught:
            calls[name]()
        assert time.perf_counter() - start < 10
        assert f"rank(s) [{1 - caller}] did not call it within 0.2 seconds" in str(caught.value)
    dist.barrier()
    group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    # The failed call does not affect later calls that all ranks make.
    for call in calls.values():
        call()


# --- communication before a dict is saved or loaded ---


@pytest.mark.spec("SD-FULL-03", "SD-FULL-09", "OSD-LOAD-01", "HYB-10")
@checkpoints.flat_or_original
@ranks(4)
def test_all_replicas_of_a_hybrid_refuse_an_invalid_dict(keep: bool) -> None:
    """A problem that several ranks have is listed once."""
    hybrid = subject.ShardingStrategy.HYBRID_SHARD
    model, optimizer = checkpoints.trained(
        steps=1, use_orig_params=keep, sharding_strategy=hybrid, process_group=grid()
    )
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    del weights["head.bias"]
    if dist.get_rank() == 3:
        del weights["scale"], states["state"]["head.weight"]
    with pytest.raises(RuntimeError, match="explain-error E-state-dict-refused") as caught:
        model.load_state_dict(weights)
    assert 'rank 0, rank 1, rank 2, rank 3: Missing key(s) in state_dict: "head.bias"' in str(caught.value)
    assert 'rank 3: Missing key(s) in state_dict: "scale"' in str(caught.value)
    with pytest.raises(RuntimeError, match=r"rank 3: key 'head\.weight': expected states"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    given = optimizer.state_dict()
    if dist.get_rank() == 3:
        given["state"][min(given["state"])]["step"] += 1
    with pytest.raises(RuntimeError, match=r"optimizer state 'step' of .*: expected 1\.0 .*found 2\.0 .* on rank 3"):
        FSDP.optim_state_dict(model, optimizer, given)
    dist.barrier()


@pytest.mark.spec("SD-FULL-03")
@ranks(3)
def test_refused_call_does_not_count_as_an_arrival_at_a_later_barrier() -> None:
    group = dist.new_group([0, 1, 2])
    groups = [Group.of(group)]
    group.set_timeout(timedelta(seconds=0.2))
    dist.barrier()
    for present, missing in (([0], 1), ([0, 2], 1), ([0], 1), ([1], 0)):
        if dist.get_rank() in present:
            # On a slow machine, one present rank may be refused before the other one arrives.
            with pytest.raises(RuntimeError, match=rf"rank\(s\) \[.*\b{missing}\b.*\] did not call it"):
                agreement.monitored_barrier(groups, "state_dict()")
        dist.barrier()
    group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    assert agreement.monitored_barrier(groups, "state_dict()") == []


@pytest.mark.spec("ORDER-11")
@checkpoints.flat_or_original
@ranks(2)
def test_state_dict_call_on_one_rank_does_not_affect_the_next_steps(keep: bool) -> None:
    group = dist.new_group([0, 1])
    model, optimizer = checkpoints.trained(steps=1, use_orig_params=keep, process_group=group)
    dist.barrier()
    if dist.get_rank() == 0:
        group.set_timeout(timedelta(seconds=0.2))
        entries = log.sequence_of(Group.of(group)).entries
        num_before = len(entries)
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] did not call it"):
            model.state_dict()
        assert log.waiting is None
        assert len(entries) == num_before
        group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    checkpoints.train(model, optimizer, [1])
    model.state_dict()
    checkpoints.train(model, optimizer, [2])


@pytest.mark.spec("SD-FULL-08")
@rank_among_fake_ranks(4)
def test_one_process_that_acts_as_rank_0_of_four_saves_and_loads() -> None:
    """Its all-gathered values are meaningless."""
    model = FSDP(torch.nn.Linear(4, 4), device_id=device())
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert next(model.parameters()).tolist() == [1.0] * 5
