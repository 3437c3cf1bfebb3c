"""State dicts that do not fit, calls that only some ranks make, and the memory that saving needs.

If a dict does not fit on one rank, all ranks must refuse it; otherwise the others would wait, or train with a different
model. A refusal must not change anything. So the tests check that every rank raises, that the message contains the key,
the expected value, the found value and the rank, that all values are unchanged, and that all ranks can continue.
"""

from __future__ import annotations

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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_tests.checkpoint.checkpoints import FULL, LOCAL, SHARDED, flat_or_original, make, wrapped
from spec_tests.harness import device, ranks
from spec_tests.subject import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
)

FSDP = FullyShardedDataParallel


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
    model.load_state_dict(other)
    found = model.state_dict()
    assert all(torch.equal(found[name], other[name]) for name in other)


@pytest.mark.spec("SD-FULL-13")
@flat_or_original
@ranks(2)
def test_non_strict_load_returns_key_differences(keep: bool) -> None:
    model = model_of(keep)
    other = model_of(keep, seed=3).state_dict()
    del other["norm.num_batches_tracked"], other["net.scale"]
    other["nobody"] = torch.ones(1)
    result = model.load_state_dict(other, strict=False)
    assert result.missing_keys == ["norm.num_batches_tracked", "net.scale"] or sorted(result.missing_keys) == [
        "net.scale",
        "norm.num_batches_tracked",
    ]
    assert result.unexpected_keys == ["nobody"]
    refused(model, {**other, "table": torch.ones(4)}, "size mismatch for table")


@pytest.mark.spec("SD-FULL-08")
@flat_or_original
@ranks(2)
def test_a_number_that_was_saved_as_a_tensor_of_one_element_is_read_as_in_a_plain_module(keep: bool) -> None:
    """Old checkpoints store 0-dimensional tensors as tensors of one element."""
    model = model_of(keep)
    state = model.state_dict()
    state["norm.num_batches_tracked"] = torch.tensor([7])
    model.load_state_dict(state)
    assert model.state_dict()["norm.num_batches_tracked"] == 7


@pytest.mark.spec("SD-SHARD-03", "SD-CFG-08")
@flat_or_original
@ranks(2)
def test_a_sharded_dict_that_does_not_fit_is_refused_on_all_ranks(keep: bool) -> None:
    model = model_of(keep)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        refused(
            model,
            broken_on_rank_1(state, lambda s: s.pop("net.head.bias")),
            'rank 1: Missing key(s) in state_dict: "net.head.bias"',
        )
        swapped = lambda s: s.update({"net.first.0.bias": s["net.head.bias"]})  # noqa: E731
        refused(model, broken_on_rank_1(state, swapped), "size mismatch for net.first.0.bias: expected shape (5,)")
        without_strictness = lambda s: model.load_state_dict(s, strict=False)  # noqa: E731
        refused(
            model,
            broken_on_rank_1(state, lambda s: s.pop("net.head.bias")),
            "rank 1: net.head.bias: expected a shard, as on other ranks, found none",
            load=without_strictness,
        )
        assert not model.load_state_dict(state).missing_keys


@pytest.mark.spec("SD-SHARD-03", "SD-SHARD-04")
@pytest.mark.parametrize("use_dtensor", [False, True])
@flat_or_original
@ranks(4)
def test_row_shards_for_other_world_size_are_refused(keep: bool, use_dtensor: bool) -> None:
    """The global shapes of these shards are correct, but their concatenation over four ranks is a different tensor."""
    pair = dist.new_group([0, 1])
    config = ShardedStateDictConfig(_use_dtensor=use_dtensor)
    of_four, of_two = wrapped(make(3), use_orig_params=keep), None
    if dist.get_rank() < 2:
        of_two = wrapped(make(), use_orig_params=keep, process_group=pair)
    with FSDP.state_dict_type(of_four, SHARDED, config):
        state = of_four.state_dict()
    if of_two is not None:
        before = values_of(of_two)
        FSDP.set_state_dict_type(of_two, SHARDED, config)
        with pytest.raises(RuntimeError) as caught:
            of_two.load_state_dict(state)
        text = str(caught.value)
        assert "first.0.weight: expected a shard of shape" in text
        assert "on this rank, found (2, 3); a sharded state dict must be loaded by as many ranks as saved it" in text
        after = values_of(of_two)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert of_two.load_state_dict(of_two.state_dict()) == ([], []), "they can go on together"
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
    wrong: dict[str, tuple[Any, list[str]]] = {
        "other sizes": (
            cut_over(torch.ones(6, 5), mesh, Shard(0)),
            [
                f"size mismatch for {name}: expected shape (2, 5), found (6, 5)",
                "build the model with the sizes that it had then",
            ],
        ),
        "turned round": (
            cut_over(full, turned, Shard(0)),
            [
                f"rank {rank}: {name}: expected a shard that starts at row {rank} on this rank, "
                f"found one that starts at row {1 - rank}",
                checkpoint,
                "ranks [1, 0] with placements (Shard(dim=0),)",
            ],
        ),
        "copies": (cut_over(full, mesh, Replicate()), [f"{name}: {by_shape}(2, 5)", checkpoint, "(Replicate(),)"]),
        "columns": (cut_over(full, mesh, Shard(1)), [f"{name}: {by_shape}(2, ", checkpoint, "(Shard(dim=1),)"]),
    }
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True)):
        state = model.state_dict()
        for value, parts in wrong.values():
            refused(model, {**state, name: value}, *parts)
        plain = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        refused(model, plain, "expected a ShardedTensor or DTensor, found a full tensor", "FULL_STATE_DICT")
        assert not model.load_state_dict(state).missing_keys
        # A single full value among shards is accepted, because a unit that was not sharded also has full values.
        assert not model.load_state_dict({**state, name: plain[name]}).missing_keys


@pytest.mark.spec("SD-CFG-08", "SD-CFG-09")
@flat_or_original
@ranks(2)
def test_state_dict_of_another_type_than_the_current_one_is_refused(keep: bool) -> None:
    model = model_of(keep)
    states = {}
    for form in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, form):
            states[form] = model.state_dict()
    expected = {
        (FULL, SHARDED): "expected a full tensor, found a ShardedTensor; call set_state_dict_type(model, "
        "StateDictType.SHARDED_STATE_DICT)",
        (SHARDED, FULL): "expected a ShardedTensor or DTensor, found a full tensor",
        (FULL, LOCAL): 'Missing key(s) in state_dict: "net.',
        (SHARDED, LOCAL): 'Missing key(s) in state_dict: "net.',
        (LOCAL, FULL): 'Missing key(s) in state_dict: "flat_param"; expected a local shard of',
        (LOCAL, SHARDED): 'Missing key(s) in state_dict: "flat_param"; expected a local shard of',
    }
    for (chosen, given), part in expected.items():
        with FSDP.state_dict_type(model, chosen):
            refused(model, states[given], part)
            model.load_state_dict(states[chosen])


@pytest.mark.spec("SD-LOCAL-04")
@flat_or_original
@ranks(4)
def test_a_local_dict_of_another_number_of_ranks_or_wrapping_is_refused_on_all(keep: bool) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier()
    model = wrapped(make(), use_orig_params=keep)
    with FSDP.state_dict_type(model, LOCAL):
        of_four = model.state_dict()
    of_two = wrapped(make(), use_orig_params=keep, process_group=pairs[dist.get_rank() // 2])
    FSDP.set_state_dict_type(of_two, LOCAL)
    parts = "first.flat_param has 5 elements", "but this rank stores 10", "rank "
    refused(of_two, of_four, *parts)
    elsewhere = wrapped(make(), use_orig_params=keep, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    FSDP.set_state_dict_type(elsewhere, LOCAL)
    refused(elsewhere, of_four, 'Missing key(s) in state_dict: "first.0.flat_param"')


@pytest.mark.spec("SD-CFG-11", "SD-FULL-13")
@flat_or_original
@ranks(2)
def test_a_unit_in_a_plain_module_refuses_before_it_is_overwritten(keep: bool) -> None:
    plain = nn.ModuleDict({"net": wrapped(make(), use_orig_params=keep)})
    other = nn.ModuleDict({"net": make(3)}).state_dict()
    wrong = broken_on_rank_1(other, lambda s: s.update({"net.head.weight": torch.ones(5, 2)}))
    refused(plain["net"], wrong, "rank 1: size mismatch for net.head.weight", load=plain.load_state_dict)
    # The plain module checks the keys, as usual.
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.scale"'):
        plain.load_state_dict({name: value for name, value in other.items() if name != "net.scale"})
    plain.load_state_dict(other)
    found = plain.state_dict()
    assert all(torch.equal(found[name], other[name]) for name in other)


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


@pytest.mark.spec("SD-LOCAL-02", "SD-SHARD-07")
@ranks(2)
def test_communication_free_state_dict_works_on_one_rank() -> None:
    local = wrapped(make())
    FSDP.set_state_dict_type(local, LOCAL)
    whole = wrapped(make(), sharding_strategy=ShardingStrategy.NO_SHARD)
    if dist.get_rank() == 0:
        assert len(local.state_dict()) == 3
        assert len(whole.state_dict()) == 7
    dist.barrier()


# --- memory ---


class Memory(TorchDispatchMode):
    """Counts, after each operation, the bytes of all live storages that were created inside the context.

    Args:
        limit: the expected maximum. If more bytes are alive, the mode waits and counts again.

    Attributes:
        peak: the largest number of bytes alive at the same time.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.peak, self._limit = 0, limit
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Excludes these tensors, which existed before."""
        self._before = {t.untyped_storage()._cdata for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)}

    def _alive(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        now = self._alive()
        for _ in range(500):
            if now <= max(self.peak, self._limit):
                break
            # Gloo uses a separate thread, which releases a tensor shortly after the wait for it.
            time.sleep(0.001)
            now = self._alive()
        self.peak = max(self.peak, now)
        return result


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
    stored = [*model.parameters(), optimizer.state_dict()]
    for write, num_states in (
        (model.state_dict, 1),
        (lambda: FSDP.optim_state_dict(model, optimizer), 2),
    ):
        result = num_states * NUM_UNITS * UNIT_BYTES if dist.get_rank() == 0 else 0
        limit = result + UNIT_BYTES + SMALL_CHANGE
        with Memory(limit) as memory:
            memory.ignore(stored)
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
        memory.ignore([*model.parameters(), optimizer.state_dict(), states])
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    if dist.get_rank() == 1:
        assert own <= memory.peak <= limit
