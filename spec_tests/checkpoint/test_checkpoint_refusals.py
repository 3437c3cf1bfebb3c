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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spec_tests.checkpoint.checkpoints import flat_or_original, make, set_form, trained, wrapped
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy


class WithBuffers(nn.Module):
    """A unit, next to a layer with buffers, an ignored layer and a plain buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = make(seed)
        self.norm = nn.BatchNorm1d(2)
        self.plain = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0))


def model_of(keep: bool, form: str = "full", seed: int = 0) -> FSDP:
    torch.manual_seed(seed)
    plain = WithBuffers(seed).to(device())
    model = wrapped(plain, ignored_states=[plain.plain], use_orig_params=keep)
    set_form(model, form)
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


# The form, a change of the dict on rank 1, and the message on all ranks.
MISFITS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no parameter": (
        "full",
        lambda s: s.pop("net.first.0.bias"),
        'Missing key(s) in state_dict: "net.first.0.bias"; expected a tensor of shape (5,), found none',
    ),
    "no buffer": ("full", lambda s: s.pop("norm.running_mean"), 'Missing key(s) in state_dict: "norm.running_mean"'),
    "no ignored parameter": ("full", lambda s: s.pop("plain.weight"), 'Missing key(s) in state_dict: "plain.weight"'),
    "another key": ("full", lambda s: s.update(nobody=torch.ones(1)), 'Unexpected key(s) in state_dict: "nobody"'),
    "shape of a parameter": (
        "full",
        lambda s: s.update({"net.head.weight": torch.ones(5, 2)}),
        "size mismatch for net.head.weight: expected shape (2, 5), found (5, 2)",
    ),
    "shape of a buffer": (
        "full",
        lambda s: s.update(table=torch.ones(4)),
        "size mismatch for table: expected shape (3,), found (4,)",
    ),
    "no tensor": ("full", lambda s: s.update({"net.scale": 3}), "net.scale: expected a tensor, found a int"),
    "empty": ("full", lambda s: s.clear(), "and 4 more"),
    "another shard": (
        "sharded",
        lambda s: s.update({"net.first.0.bias": s["net.head.bias"]}),
        "size mismatch for net.first.0.bias: expected shape (5,)",
    ),
    "no shard": ("sharded", lambda s: s.pop("net.head.bias"), 'Missing key(s) in state_dict: "net.head.bias"'),
}


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "SD-FULL-13", "SD-SHARD-03")
@pytest.mark.parametrize("case", MISFITS)
@flat_or_original
@ranks(2)
def test_a_dict_that_does_not_fit_on_rank_1_is_refused_on_all(keep: bool, case: str) -> None:
    form, change, message = MISFITS[case]
    model, state = model_of(keep, form), dict(model_of(keep, form, seed=3).state_dict())
    if dist.get_rank() == 1:
        change(state)
    with refused(model, "rank 1: ", message):
        model.load_state_dict(state)
    assert model.load_state_dict(model.state_dict()) == ([], []), "no rank waits"


@pytest.mark.spec("SD-FULL-13")
@flat_or_original
@ranks(2)
def test_non_strict_load_returns_key_differences(keep: bool) -> None:
    model = model_of(keep)
    other = model_of(keep, seed=3).state_dict()
    missing = ["net.first.0.bias", "net.scale", "norm.num_batches_tracked"]
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
        set_form(model, form)
        state = dict(model.state_dict())
        if dist.get_rank() == 1:
            del state["net.head.bias"]
        with refused(model, "rank 1: net.head.bias: expected a shard, as on other ranks, found none"):
            model.load_state_dict(state, strict=False)


@pytest.mark.spec("SD-SHARD-03", "SD-SHARD-04", "SD-LOCAL-04", "OSD-LOAD-01", "OSD-LOAD-08")
@pytest.mark.parametrize("form", ["sharded", "dtensor", "local"])
@flat_or_original
@ranks(4)
def test_shards_of_another_number_of_ranks_are_refused(keep: bool, form: str) -> None:
    """The global shapes of these shards are correct, but their concatenation over four ranks is a different tensor."""
    of_four, optimizer = trained(steps=1, seed=3, use_orig_params=keep)
    of_two, fresh = trained(steps=0, use_orig_params=keep, process_group=grid()[0])
    for model in (of_four, of_two):
        set_form(model, form)
    rows = 2 if dist.get_rank() < 2 else 1
    found = f"on this rank, found ({rows}, 3); a sharded state dict must be loaded by as many ranks as saved it"
    parts = ["first.flat_param has 5 elements", "this rank stores 10"] if form == "local" else ["first.0.weight", found]
    with refused(of_two, *parts):
        of_two.load_state_dict(of_four.state_dict())
    if form != "local":
        states = FSDP.optim_state_dict(of_four, optimizer)
        with pytest.raises(RuntimeError, match=r"expected a shard of shape .* on this rank, found"):
            FSDP.optim_state_dict_to_load(of_two, fresh, states)
    assert of_two.load_state_dict(of_two.state_dict()) == ([], []), "the two can train together"
    dist.barrier()


@pytest.mark.spec("SD-LOCAL-04")
@flat_or_original
@ranks(2)
def test_a_local_dict_of_other_units_or_another_dtype_is_refused(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    other_units = wrapped(make(), use_orig_params=keep, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    of_double = wrapped(make().double(), use_orig_params=keep)
    for each in (model, other_units, of_double):
        set_form(each, "local")
    with refused(other_units, 'Missing key(s) in state_dict: "first.0.flat_param"'):
        other_units.load_state_dict(model.state_dict())
    with refused(of_double, "elements (torch.float32), but this rank stores", "(torch.float64)"):
        of_double.load_state_dict(model.state_dict())


@pytest.mark.spec("SD-SHARD-03")
@pytest.mark.parametrize("wrong", ["shape", "order of ranks", "replicated", "columns", "full"])
@flat_or_original
@ranks(2)
def test_dtensor_with_wrong_sharding_is_refused_with_remedy(keep: bool, wrong: str) -> None:
    model, rank, name = model_of(keep, "dtensor"), dist.get_rank(), "net.head.weight"
    mesh, turned = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    full = make().head.weight.detach().cpu()
    expected_row = f"{name}: expected a shard that starts at row {rank} on this rank, found one that starts at row"
    by_shape = f"{name}: expected a shard of shape (1, 5) on this rank, found"
    value, mesh, placement, *parts = {
        "shape": (torch.ones(6, 5), mesh, Shard(0), "expected shape (2, 5), found (6, 5)", "build the model with the"),
        "order of ranks": (full, turned, Shard(0), f"{expected_row} {1 - rank}", "use torch.distributed.checkpoint"),
        "replicated": (full, mesh, Replicate(), f"{by_shape} (2, 5)", "(Replicate(),)"),
        "columns": (full, mesh, Shard(1), f"{by_shape} (2, ", "(Shard(dim=1),)"),
        "full": (full, mesh, None, "expected a ShardedTensor or DTensor, found a full tensor", "FULL_STATE_DICT"),
    }[wrong]
    state = model.state_dict()
    given = {**state, name: value}
    if placement is None:
        given = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    else:
        given[name] = distribute_tensor(value, mesh, [placement], src_data_rank=None)
    with refused(model, *parts):
        model.load_state_dict(given)
    # A single full value among shards is accepted, because a unit that was not sharded also has full values.
    assert not model.load_state_dict({**state, name: full}).missing_keys


REMEDY = "call set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
NO_FLAT_PARAM = 'Missing key(s) in state_dict: "flat_param"; expected a local shard of'


@pytest.mark.spec("SD-CFG-08", "SD-FULL-09")
@pytest.mark.parametrize(
    ("chosen", "given", "message"),
    [
        ("full", "sharded", f"expected a full tensor, found a ShardedTensor; {REMEDY}"),
        ("sharded", "full", "expected a ShardedTensor or DTensor, found a full tensor"),
        ("full", "local", 'Missing key(s) in state_dict: "net.'),
        ("sharded", "local", 'Missing key(s) in state_dict: "net.'),
        ("local", "full", NO_FLAT_PARAM),
        ("local", "sharded", NO_FLAT_PARAM),
    ],
)
@flat_or_original
@ranks(2)
def test_a_dict_of_another_form_is_refused(keep: bool, chosen: str, given: str, message: str) -> None:
    model, state = model_of(keep, chosen), model_of(keep, given).state_dict()
    with refused(model, message):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())


@pytest.mark.spec("SD-CFG-11", "SD-FULL-13")
@flat_or_original
@ranks(2)
def test_a_unit_in_a_plain_module_refuses_before_it_is_overwritten(keep: bool) -> None:
    plain = nn.ModuleDict({"net": wrapped(make(), use_orig_params=keep)})
    other = nn.ModuleDict({"net": make(3)}).state_dict()
    wrong = {**other, "net.head.weight": torch.ones(5, 2)} if dist.get_rank() == 1 else other
    with refused(plain["net"], "rank 1: size mismatch for net.head.weight"):
        plain.load_state_dict(wrong)
    # The plain module checks the keys, as usual. A strict load of the unit does not affect its later loads.
    without_scale = {name: value for name, value in other.items() if name != "net.scale"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.scale"'):
        plain.load_state_dict(without_scale)
    plain["net"].load_state_dict(plain["net"].state_dict())
    assert plain.load_state_dict(without_scale, strict=False).missing_keys == ["net.scale"]
    found = plain.state_dict()
    assert all(torch.equal(found[name], value) for name, value in without_scale.items())


@pytest.mark.spec("SD-FULL-03", "OSD-FULL-02")
@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "optim_state_dict", "optim_state_dict_to_load"])
@ranks(2)
def test_call_on_one_rank_times_out_with_its_name_and_the_missing_ranks(name: str) -> None:
    group = dist.new_group([0, 1])
    model = wrapped(make(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
