"""State dicts that do not fit, calls that only some ranks make, and the memory that saving needs.

If a dict does not fit on one rank, all ranks must refuse it; otherwise the others would wait, or train with a different
model. A refusal must not change anything. So the tests check that every rank raises, that the message contains the key,
the expected value, the found value and the rank, that all values are unchanged, and that all ranks can continue.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from spec_tests.checkpoint.checkpoints import FULL, LOCAL, SHARDED, flat_or_original, make, trained, wrapped
from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.subject import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ModuleWrapPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.waiting import comes_true


class WithBuffers(nn.Module):
    """A unit, next to a layer with buffers, an ignored layer and a plain buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = make(seed)
        self.norm = nn.BatchNorm1d(2)
        self.plain = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0))


def model_of(keep: bool, seed: int = 0) -> FSDP:
    torch.manual_seed(seed)
    plain = WithBuffers(seed).to(device())
    return FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        ignored_states=[plain.plain],
        use_orig_params=keep,
    )


def values_of(model: FSDP) -> dict[str, torch.Tensor]:
    """All values on this rank: shards and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def refused(model: FSDP, state: dict[str, Any], *parts: str, load: Callable[..., Any] | None = None) -> None:
    before = values_of(model)
    with pytest.raises(RuntimeError) as caught:
        (load or model.load_state_dict)(state)
    opening = "Error(s) in loading state_dict for "
    for part in (f"rank {dist.get_rank()}: {opening}", "the state dict is refused on every rank", *parts):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    after = values_of(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    dist.barrier()


def broken_on_rank_1(state: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = dict(state)
    if dist.get_rank() == 1:
        change(state)
    return state


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "SD-FULL-13")
@flat_or_original
@ranks(2)
def test_a_full_dict_that_does_not_fit_on_one_rank_is_refused_on_all(keep: bool) -> None:
    model = model_of(keep)
    other = model_of(keep, seed=3).state_dict()

    def check(change: Callable[[dict[str, Any]], Any], *parts: str) -> None:
        refused(model, broken_on_rank_1(other, change), "rank 1: ", *parts)

    none_found = "expected a tensor of shape (5,), found none"
    check(lambda s: s.pop("net.first.0.bias"), 'Missing key(s) in state_dict: "net.first.0.bias"', none_found)
    check(lambda s: s.pop("norm.running_mean"), 'Missing key(s) in state_dict: "norm.running_mean"')
    check(lambda s: s.pop("plain.weight"), 'Missing key(s) in state_dict: "plain.weight"')
    check(lambda s: s.update(nobody=torch.ones(1)), 'Unexpected key(s) in state_dict: "nobody"')
    check(
        lambda s: s.update({"net.head.weight": torch.ones(5, 2)}),
        "size mismatch for net.head.weight: expected shape (2, 5), found (5, 2)",
    )
    check(lambda s: s.update(table=torch.ones(4)), "size mismatch for table: expected shape (3,), found (4,)")
    check(lambda s: s.update({"net.scale": 3}), "net.scale: expected a tensor, found a int")
    check(lambda s: s.clear(), "and 4 more")
    # Old checkpoints store a 0-dimensional tensor as a tensor of one element.
    model.load_state_dict({**other, "norm.num_batches_tracked": torch.tensor([7])})
    found = model.state_dict()
    assert found.pop("norm.num_batches_tracked") == 7
    assert all(torch.equal(value, other[name]) for name, value in found.items())


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
    refused(model, {**other, "table": torch.ones(4)}, "size mismatch for table")
    on_rank_0 = broken_on_rank_1(model.state_dict(), lambda s: s.pop("net.head.bias"))
    lacking = "rank 1: net.head.bias: expected a shard, as on other ranks, found none"
    refused(model, on_rank_0, lacking, load=functools.partial(model.load_state_dict, strict=False))


@pytest.mark.spec("SD-SHARD-03", "SD-CFG-08")
@flat_or_original
@ranks(2)
def test_a_sharded_dict_that_does_not_fit_is_refused_on_all_ranks(keep: bool) -> None:
    model = model_of(keep)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        swapped = broken_on_rank_1(state, lambda s: s.update({"net.first.0.bias": s["net.head.bias"]}))
        refused(model, swapped, "size mismatch for net.first.0.bias: expected shape (5,)")
        without_bias = broken_on_rank_1(state, lambda s: s.pop("net.head.bias"))
        refused(model, without_bias, 'rank 1: Missing key(s) in state_dict: "net.head.bias"')
        refused(
            model,
            without_bias,
            "rank 1: net.head.bias: expected a shard, as on other ranks, found none",
            load=functools.partial(model.load_state_dict, strict=False),
        )
        assert not model.load_state_dict(state).missing_keys


@pytest.mark.spec("SD-SHARD-03", "SD-SHARD-04", "SD-LOCAL-04", "OSD-LOAD-01", "OSD-LOAD-08")
@pytest.mark.parametrize("form", ["sharded tensor", "dtensor", "local"])
@flat_or_original
@ranks(4)
def test_shards_of_another_number_of_ranks_are_refused(keep: bool, form: str) -> None:
    """The global shapes of these shards are correct, but their concatenation over four ranks is a different tensor."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier()
    settings: Any = (LOCAL,)
    if form != "local":
        kind = {"_use_dtensor": form == "dtensor"}
        settings = SHARDED, ShardedStateDictConfig(**kind), ShardedOptimStateDictConfig(**kind)
    of_four, optimizer = trained(steps=1, seed=3, use_orig_params=keep)
    of_two, fresh = trained(steps=0, use_orig_params=keep, process_group=pairs[dist.get_rank() // 2])
    for model in (of_four, of_two):
        FSDP.set_state_dict_type(model, *settings)
    state = of_four.state_dict()
    if form == "local":
        refused(of_two, state, "first.flat_param has 5 elements", "but this rank stores 10", "rank ")
        elsewhere = wrapped(make(), use_orig_params=keep, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        FSDP.set_state_dict_type(elsewhere, LOCAL)
        refused(elsewhere, state, 'Missing key(s) in state_dict: "first.0.flat_param"')
        of_double = wrapped(make().double(), use_orig_params=keep)
        FSDP.set_state_dict_type(of_double, LOCAL)
        refused(of_double, state, "has 5 elements (torch.float32), but this rank stores 5 (torch.float64)")
    else:
        rows = 2 if dist.get_rank() < 2 else 1
        found = f"on this rank, found ({rows}, 3); a sharded state dict must be loaded by as many ranks as saved it"
        refused(of_two, state, "first.0.weight: expected a shard of shape", found)
        states = FSDP.optim_state_dict(of_four, optimizer)
        with pytest.raises(RuntimeError, match=r"expected a shard of shape .* on this rank, found"):
            FSDP.optim_state_dict_to_load(of_two, fresh, states)
    assert of_two.load_state_dict(of_two.state_dict()) == ([], []), "the two can train together"
    dist.barrier()


def cut_over(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


@pytest.mark.spec("SD-SHARD-03")
@flat_or_original
@ranks(2)
def test_dtensor_with_wrong_sharding_is_refused_with_remedy(keep: bool) -> None:
    name = "net.head.weight"
    model = model_of(keep)
    full = model.state_dict()[name].cpu()
    mesh, turned = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    rank = dist.get_rank()
    by_shape = "expected a shard of shape (1, 5) on this rank, found "
    checkpoint = "use torch.distributed.checkpoint to change"
    sizes = f"size mismatch for {name}: expected shape (2, 5), found (6, 5)"
    row = f"rank {rank}: {name}: expected a shard that starts at row {rank} on this rank, found one that starts at row"
    wrong: list[tuple[Any, list[str]]] = [
        (cut_over(torch.ones(6, 5), mesh, Shard(0)), [sizes, "build the model with the sizes that it had then"]),
        (
            cut_over(full, turned, Shard(0)),
            [f"{row} {1 - rank}", checkpoint, "ranks [1, 0] with placements (Shard(dim=0),)"],
        ),
        (cut_over(full, mesh, Replicate()), [f"{name}: {by_shape}(2, 5)", checkpoint, "(Replicate(),)"]),
        (cut_over(full, mesh, Shard(1)), [f"{name}: {by_shape}(2, ", checkpoint, "(Shard(dim=1),)"]),
    ]
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True)):
        state = model.state_dict()
        for value, parts in wrong:
            refused(model, {**state, name: value}, *parts)
        plain = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        refused(model, plain, "expected a ShardedTensor or DTensor, found a full tensor", "FULL_STATE_DICT")
        assert not model.load_state_dict(state).missing_keys
        # A single full value among shards is accepted, because a unit that was not sharded also has full values.
        assert not model.load_state_dict({**state, name: plain[name]}).missing_keys


@pytest.mark.spec("SD-CFG-08", "SD-FULL-09")
@flat_or_original
@ranks(2)
def test_state_dict_of_another_type_than_the_current_one_is_refused(keep: bool) -> None:
    model = model_of(keep)
    states = {}
    for form in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, form):
            states[form] = model.state_dict()
    remedy = "call set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
    no_plain_key = 'Missing key(s) in state_dict: "net.'
    no_flat_param = 'Missing key(s) in state_dict: "flat_param"; expected a local shard of'
    expected = {
        (FULL, SHARDED): f"expected a full tensor, found a ShardedTensor; {remedy}",
        (SHARDED, FULL): "expected a ShardedTensor or DTensor, found a full tensor",
        (FULL, LOCAL): no_plain_key,
        (SHARDED, LOCAL): no_plain_key,
        (LOCAL, FULL): no_flat_param,
        (LOCAL, SHARDED): no_flat_param,
    }
    for (chosen, given), part in expected.items():
        with FSDP.state_dict_type(model, chosen):
            refused(model, states[given], part)
            model.load_state_dict(states[chosen])


@pytest.mark.spec("SD-CFG-11", "SD-FULL-13")
@flat_or_original
@ranks(2)
def test_a_unit_in_a_plain_module_refuses_before_it_is_overwritten(keep: bool) -> None:
    plain = nn.ModuleDict({"net": wrapped(make(), use_orig_params=keep)})
    other = nn.ModuleDict({"net": make(3)}).state_dict()
    wrong = broken_on_rank_1(other, lambda s: s.update({"net.head.weight": torch.ones(5, 2)}))
    refused(plain["net"], wrong, "rank 1: size mismatch for net.head.weight", load=plain.load_state_dict)
    # The plain module checks the keys, as usual.
    without_scale = {name: value for name, value in other.items() if name != "net.scale"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.scale"'):
        plain.load_state_dict(without_scale)
    # A strict load of the unit does not affect later loads of the plain module.
    plain["net"].load_state_dict(plain["net"].state_dict())
    assert plain.load_state_dict(without_scale, strict=False).missing_keys == ["net.scale"]
    found = plain.state_dict()
    assert all(torch.equal(found[name], value) for name, value in without_scale.items())


@pytest.mark.spec("SD-FULL-13")
@ranks(2)
def test_custom_loading_of_module_is_respected() -> None:
    class Renamed(nn.Module):
        """Loads the state of an earlier version of its class."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("now", torch.zeros(2))

        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            state[prefix + "now"] = state.pop(prefix + "then")
            super()._load_from_state_dict(state, prefix, *rest)

    model = FSDP(nn.Sequential(nn.Linear(2, 2), Renamed()).to(device()))
    state = model.state_dict()
    state["1.then"] = state.pop("1.now") + 5
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(model.module[1].now.cpu(), torch.tensor([5.0, 5.0]))


# --- calls on only some ranks ---


@pytest.mark.spec("SD-FULL-03", "OSD-FULL-02")
@pytest.mark.parametrize(("caller", "missing"), [(0, "[1]"), (1, "[0]")])
@ranks(2)
def test_call_on_one_rank_times_out_with_its_name_and_the_missing_ranks(caller: int, missing: str) -> None:
    group = dist.new_group([0, 1])
    model = wrapped(make(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = model.state_dict()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("state_dict()", model.state_dict),
        ("load_state_dict()", lambda: model.load_state_dict(state)),
        ("optim_state_dict()", lambda: FSDP.optim_state_dict(model, optimizer)),
        ("optim_state_dict_to_load()", lambda: FSDP.optim_state_dict_to_load(model, optimizer, {})),
    ]
    group.set_timeout(timedelta(seconds=0.2))
    dist.barrier()
    if dist.get_rank() == caller:
        # Each rank tests two of the calls, because the store cannot wait for less than a second.
        for name, call in calls[caller::2]:
            start = time.perf_counter()
            with pytest.raises(RuntimeError) as caught:
                call()
            assert time.perf_counter() - start < 10
            assert f"rank {caller}: {name} must be called by all of the ranks [0, 1]" in str(caught.value)
            assert f"rank(s) {missing} did not call it within 0.2 seconds" in str(caught.value)
    dist.barrier()
    group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    # The failed calls do not affect later calls that all ranks make.
    for _ in range(3):
        assert model.state_dict().keys() == state.keys()
        model.load_state_dict(state)
        states = FSDP.optim_state_dict(model, optimizer)
        assert FSDP.optim_state_dict_to_load(model, optimizer, states)["state"] == {}


@pytest.mark.spec("SD-LOCAL-02")
@ranks(2)
def test_local_state_dict_works_on_one_rank_alone() -> None:
    model = wrapped(make())
    FSDP.set_state_dict_type(model, LOCAL)
    if dist.get_rank() == 0:
        assert len(model.state_dict()) == 3
    dist.barrier()


# --- memory ---


class Memory(LiveBytes):
    """Waits before it counts more than ``limit`` bytes, because gloo's thread releases a tensor a moment later."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def now(self) -> int:
        allowed = max(self.peak, self._limit)
        comes_true(lambda: LiveBytes.now(self) <= allowed, limit=0.5)
        return super().now()


WIDTH = 96
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
NUM_UNITS = 6
# Allows for the barrier's numbers, names, and the buffers of object collectives.
SMALL_CHANGE = UNIT_BYTES // 4


def blocks(keep: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)]).to(device())
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, WIDTH, device=device())).sum().backward()
    optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True), config)
    return model, optimizer


@pytest.mark.spec("SD-FULL-06", "OSD-05")
@flat_or_original
@ranks(2)
def test_rank_without_result_holds_at_most_one_extra_unit(keep: bool) -> None:
    model, optimizer = blocks(keep)
    for write, num_states in (
        (model.state_dict, 1),
        (lambda: FSDP.optim_state_dict(model, optimizer), 2),
    ):
        result = num_states * NUM_UNITS * UNIT_BYTES if dist.get_rank() == 0 else 0
        limit = result + UNIT_BYTES + SMALL_CHANGE
        with Memory(limit) as memory:
            state = write()
        assert bool(state) is (dist.get_rank() == 0)
        assert max(result, UNIT_BYTES) <= memory.peak <= limit
        del state


@pytest.mark.spec("OSD-LOAD-05", "OSD-SCAT-02")
@flat_or_original
@ranks(2)
def test_reading_from_rank_0_needs_only_own_shards(keep: bool) -> None:
    model, optimizer = blocks(keep)
    states = FSDP.optim_state_dict(model, optimizer)
    own = 2 * NUM_UNITS * UNIT_BYTES // 2
    limit = own + UNIT_BYTES + SMALL_CHANGE
    with Memory(limit) as memory:
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    if dist.get_rank() == 1:
        assert own <= memory.peak <= limit
