"""Initial values and their device: device selection, synchronization from rank 0, and the meta device."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine.precision import move
from minifsdp.fsdp1 import build, initial
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, NormedBlock, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, HYBRID_SHARD, grid, wrapped
from spec_tests.models.values import assert_same, flat_gradients, flat_parameters, full_values, mean_gradients, named
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, always_wrap_policy, trace

FSDP = FullyShardedDataParallel


def tower() -> nn.Module:
    """Two units with buffers. The root has parameters and, in its batch norm, buffers of its own."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), NormedBlock(), NormedBlock(), nn.BatchNorm1d(WIDTH))


def random_tower(seed: int) -> nn.Module:
    """A tower with random parameters and buffers that depend on the seed."""
    dice = torch.Generator().manual_seed(seed)
    model = tower()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = (torch.rand(tensor.shape, generator=dice) * 100).to(tensor.dtype)
    return model.to(device())


def by_blocks(model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def gathered_values(model: FSDP) -> dict[str, Tensor]:
    """Unsharded parameters and buffers by their original names."""
    with FSDP.summon_full_params(model, writeback=False):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return {**named(model), **buffers}


def plain_values(model: nn.Module) -> dict[str, Tensor]:
    return {**named(model), **dict(model.named_buffers())}


# --- device selection ---


class Elsewhere(nn.Module):
    """Reports parameters on any given devices, also on devices that this machine does not have."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.spec("DEV-01", "DEV-09")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_a_model_trains_with_and_without_a_device_id(given: bool, strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(copy.deepcopy(plain), device_id=device() if given else None, sharding_strategy=strategy)
    assert {unit.compute_device for unit in FSDP.fsdp_modules(model)} == {device()}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        mean = mean_gradients(plain, [step])
        iterate(model, step)
        for name, parameter in plain.named_parameters():
            parameter.grad = mean[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {parameter.device for parameter in model.parameters()} == {device()}
    assert_same(full_values(model), named(plain))


@pytest.mark.spec("DEV-01")
@pytest.mark.accelerator
@ranks(2)
def test_an_index_selects_the_accelerator() -> None:
    model = wrapped(Stack(), device_id=device().index)
    assert {parameter.device for parameter in model.parameters()} == {device()}


@pytest.mark.spec("DEV-02")
@ranks(2)
def test_compute_device_is_the_device_of_the_module() -> None:
    model = FSDP(seeded())
    assert model.compute_device == device()
    assert {parameter.device for parameter in model.parameters()} == {device()}


@pytest.mark.spec("DEV-02")
@pytest.mark.pure
def test_an_accelerator_that_the_module_is_on_is_the_compute_device() -> None:
    assert build.compute_device(Elsewhere("cuda:3", "cuda:3"), None) == torch.device("cuda", 3)
    assert build.compute_device(Elsewhere("cuda:3"), torch.device("cuda", 3)) == torch.device("cuda", 3)
    assert build.compute_device(Elsewhere("cpu"), torch.device("cpu")) == torch.device("cpu")


@pytest.mark.spec("DEV-03")
@pytest.mark.accelerator
@ranks(2)
def test_cpu_module_is_initialized_there_and_computes_on_the_current_device_with_a_warning() -> None:
    computed_on: list[torch.device] = []
    plain = tower()
    for layer in plain:
        layer.register_forward_hook(lambda module, args, output: computed_on.append(output.device))
    with pytest.warns(UserWarning, match="device_id"):
        model = by_blocks(plain)
    iterate(model)
    assert computed_on == [device()] * 4
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device()}


@pytest.mark.spec("DEV-04")
@ranks(2)
def test_with_device_id_parameters_and_buffers_are_on_that_device_after_construction() -> None:
    plain = tower()
    buffers = dict(plain.named_buffers())
    model = by_blocks(plain, device_id=device())
    assert {parameter.device for parameter in model.parameters()} == {device()}
    assert {buffer.device for buffer in model.buffers()} == {device()}
    if device().type == "cpu":
        assert all(after is buffers[name] for name, after in buffers_of(model).items()), "the very same objects"
    loss_of(model(batch())).backward()


@pytest.mark.spec("DEV-05", "DEV-04")
@ranks(2)
def test_units_are_moved_and_sharded_one_by_one_from_inner_to_outer() -> None:
    model = seeded()
    calls: list[tuple[list[str], int]] = []
    paths = {module: path for path, module in model.named_modules()}

    def noting(modules: Any, device: torch.device, ignored: Any) -> None:
        owners = [paths[module] for _, module in modules if module._parameters]
        calls.append((owners, len(FSDP.fsdp_modules(model))))
        original(modules, device, ignored)

    original = initial.move_modules
    with mock.patch.object(initial, "move_modules", noting):
        wrapped(model, device_id=device())
    # Each entry has the modules that are moved, and the number of units that are already sharded at that time.
    assert calls == [*(([f"blocks.{index}.linear"], index) for index in range(4)), (["enter", "leave"], 4)]


@pytest.mark.spec("DEV-05")
@pytest.mark.accelerator
@ranks(2)
def test_full_model_is_never_on_device_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    full = sum(parameter.nbytes for parameter in model.parameters())
    accelerator = torch.get_device_module(device())
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=device())
    # Half of the parameters stay on this rank. The rest allows for one layer and one flat parameter before sharding.
    assert accelerator.max_memory_allocated() - before < 0.9 * full
    del model


@pytest.mark.spec("DEV-06")
@pytest.mark.pure
def test_device_id_on_another_accelerator_than_the_module_raises_with_both_devices() -> None:
    with pytest.raises(ValueError, match=r"rank 0: .*cuda:1.*cuda:0"):
        build.compute_device(Elsewhere("cuda:0", "cuda:0"), torch.device("cuda", 1))
    with pytest.raises(ValueError, match=r"cpu.*cuda:0"):
        build.compute_device(Elsewhere("cuda:0"), torch.device("cpu"))


@pytest.mark.spec("DEV-06")
@pytest.mark.accelerator
@ranks(2)
def test_another_accelerator_than_that_of_the_module_is_refused() -> None:
    other = torch.device(device().type, device().index + 1)
    with refused(ValueError, str(device()), str(other)):
        FSDP(nn.Linear(2, 2).to(device()), device_id=other, sync_module_states=True)


@pytest.mark.spec("DEV-07")
@ranks(2)
def test_a_function_that_was_not_called_is_refused() -> None:
    with refused(TypeError, "device_id", "call it"):
        wrapped(device_id=torch.cuda.current_device, sync_module_states=True)


@pytest.mark.spec("DEV-07")
@pytest.mark.accelerator
@ranks(2)
def test_a_device_without_an_index_is_the_current_one_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="index"):
        model = FSDP(nn.Linear(2, 2), device_id=torch.device(device().type))
    assert model.compute_device == device()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = torch.get_device_module(device()).current_device()
        assert FSDP(nn.Linear(2, 2), device_id=index).compute_device == device()


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.spec("DEV-08")
@pytest.mark.pure
def test_moving_reaches_every_tensor_and_keeps_the_structure() -> None:
    args = (
        torch.ones(2),
        [{"x": torch.ones(3, dtype=torch.int64), "y": (torch.ones(1), "word", None)}],
        Pair(1, [2.5]),
    )
    moved = move(torch.device("meta"), args)
    assert isinstance(moved, tuple)
    first, (record,), pair = moved
    assert (first.device.type, first.shape) == ("meta", (2,))
    assert list(record) == ["x", "y"]
    assert (record["x"].device.type, record["x"].dtype) == ("meta", torch.int64)
    assert isinstance(record["y"], tuple)
    assert record["y"][0].device.type == "meta"
    assert record["y"][1:] == ("word", None)
    assert type(pair) is Pair
    assert pair == Pair(1, [2.5])
    assert args[0].device.type == args[1][0]["x"].device.type == "cpu", "the caller's own are not changed"
    assert move(torch.device("cpu"), args[0]) is args[0], "what is there already is not copied"


@pytest.mark.spec("DEV-08")
@ranks(2)
def test_inputs_of_any_nesting_are_on_the_compute_device_in_forward() -> None:
    class Collects(nn.Linear):
        def forward(self, x: Tensor, *more: Any, options: dict[str, Any]) -> Tensor:
            seen.extend(t.device for t in (x, more[0][1][0], options["mask"], options["deep"][0]["y"]))
            return super().forward(x)

    seen: list[torch.device] = []
    model = FSDP(Collects(4, 2).to(device()))
    # The batch is created on the CPU in any case.
    options = {"mask": torch.ones(3, dtype=torch.bool), "deep": ({"y": torch.ones(1)},), "text": "word"}
    model(torch.ones(3, 4), ("a", [torch.ones(1)]), options=options).sum().backward()
    assert seen == [device()] * 4
    assert options["mask"].device.type == "cpu"


@pytest.mark.spec("DEV-10")
@pytest.mark.pure
def test_parameters_on_several_devices_are_refused() -> None:
    several = r"rank 0: .*several devices.*cpu.*cuda:0|rank 0: .*several devices.*cuda:0.*cpu"
    with pytest.raises(RuntimeError, match=several):
        build.compute_device(Elsewhere("cpu", "cuda:0"), None)
    assert build.compute_device(Elsewhere("cpu", "cuda:0"), torch.device("cuda", 0)) == torch.device("cuda", 0)
    for device_id in (None, torch.device("cuda", 0), torch.device("cpu")):
        with pytest.raises(RuntimeError, match=r"cuda:0.*cuda:1"):
            build.compute_device(Elsewhere("cuda:0", "cuda:1"), device_id)
    # The meta device does not count, because its tensors can move to any device.
    assert build.compute_device(Elsewhere("meta", "cuda:0"), None) == torch.device("cuda", 0)


@pytest.mark.spec("DEV-10", "META-01")
@ranks(2)
def test_parameters_on_the_meta_device_and_on_a_real_one_are_no_mistake() -> None:
    plain = nn.Sequential(nn.Linear(4, 4, device=device()), nn.Linear(4, 4, device="meta"))
    model = FSDP(plain)
    assert model.compute_device == device()
    assert {parameter.device for parameter in model.parameters()} == {device()}


@pytest.mark.spec("DEV-10")
@pytest.mark.accelerator
@ranks(2)
def test_a_model_on_the_cpu_and_on_an_accelerator_needs_a_device_id() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device=device()))

    with refused(RuntimeError, "several devices", "device_id"):
        FSDP(mixed())
    assert {parameter.device for parameter in FSDP(mixed(), device_id=device()).parameters()} == {device()}


# --- synchronization from rank 0 ---


@pytest.mark.spec("SYNC-01")
@pytest.mark.parametrize("options", [{}, {"sync_module_states": False}])
@ranks(2)
def test_default_construction_sends_nothing_and_each_rank_keeps_its_values(options: dict[str, Any]) -> None:
    mine = random_tower(seed=dist.get_rank())
    expected = copy.deepcopy(mine)
    with trace.record() as recorder, Wire() as wire:
        model = by_blocks(mine, **options)
    assert recorder.count("BCAST") == 0
    assert num_broadcasts(wire) == 0
    both = [named(random_tower(seed)) for seed in (0, 1)]
    for unit, flat in flat_parameters(model).items():
        rows = [row_of(unit, values) for values in both]
        other = 1 - dist.get_rank()
        assert torch.equal(flat.detach(), local_shard(rows[dist.get_rank()]))
        assert not torch.equal(flat.detach(), local_shard(rows[other]))
    assert_same(buffers_of(model), dict(expected.named_buffers()), bitwise=True)


def num_broadcasts(wire: Wire) -> int:
    return sum(kind == "broadcast_" for kind, _ in wire.sent)


def row_of(unit: str, values: dict[str, Tensor]) -> Tensor:
    """The values of one unit of the tower, concatenated. The root has all values that are not in a block."""
    mine = [value for name, value in values.items() if name.startswith(f"{unit}." if unit else ("0.", "3."))]
    return torch.cat([value.reshape(-1) for value in mine])


def local_shard(row: Tensor) -> Tensor:
    return row.chunk(dist.get_world_size())[dist.get_rank()]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}


@pytest.mark.spec("SYNC-02", "SYNC-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_with_sync_every_rank_has_the_parameters_and_buffers_of_rank_0(strategy: ShardingStrategy, keep: bool) -> None:
    model = by_blocks(
        random_tower(seed=dist.get_rank()), sync_module_states=True, sharding_strategy=strategy, use_orig_params=keep
    )
    values = gathered_values(model)
    assert_same(values, plain_values(random_tower(seed=0)), bitwise=True)
    assert len(dict(model.named_buffers())) == 9
    with pytest.raises(AssertionError):
        assert_same(plain_values(random_tower(seed=1)), values, bitwise=True)


@pytest.mark.spec("SYNC-02")
@ranks(4)
def test_with_sync_a_hybrid_has_one_source_for_all_its_ranks() -> None:
    options = {"sharding_strategy": HYBRID_SHARD, "process_group": grid()}
    model = by_blocks(random_tower(seed=dist.get_rank()), sync_module_states=True, **options)
    assert_same(gathered_values(model), plain_values(random_tower(seed=0)), bitwise=True)


@pytest.mark.spec("SYNC-02")
@ranks(4)
def test_with_sync_the_source_is_the_first_rank_of_the_units_own_group() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    model = by_blocks(random_tower(seed=dist.get_rank()), sync_module_states=True, process_group=mine)
    assert_same(gathered_values(model), plain_values(random_tower(seed=dist.get_rank() % 2)), bitwise=True)


@pytest.mark.spec("SYNC-03")
@ranks(2)
def test_each_unit_sends_at_least_one_broadcast() -> None:
    model = random_tower(seed=0)
    for index in (1, 2):
        with trace.record() as recorder:
            model[index] = FSDP(model[index], sync_module_states=True)
        assert recorder.count("BCAST") >= 1
    with trace.record() as recorder, Wire() as wire:
        FSDP(model, sync_module_states=True)
    assert recorder.count("BCAST") == num_broadcasts(wire) >= 1
    with trace.record() as recorder:
        by_blocks(random_tower(seed=0), sync_module_states=True)
    assert recorder.count("BCAST") >= 3
    assert {event.ranks for event in recorder.events if event.kind == "BCAST"} == {(0, 1)}


class Shares(Block):
    """A block with a lookup table that all blocks share."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


@pytest.mark.spec("SYNC-03")
@ranks(2)
def test_buffer_shared_by_several_nested_units_is_sent_once() -> None:
    table = torch.full((1000,), float(dist.get_rank()), device=device())
    inner = nn.Sequential(Shares(table), Shares(table))
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, Shares(table)).to(device())
    num_parameters = sum(parameter.numel() for parameter in outer.parameters())
    policy = ModuleWrapPolicy({Block, nn.Sequential})
    with Wire() as wire:
        model = FSDP(outer, auto_wrap_policy=policy, sync_module_states=True)
    assert len(FSDP.fsdp_modules(model)) == 5
    sent = sum(numel for kind, numel in wire.sent if kind == "broadcast_")
    assert sent == num_parameters + 1000, "every parameter once, and the table once"
    for owner in (inner[0].module, inner[1].module, outer[2].module):
        assert owner.table is table
        assert torch.equal(table, torch.zeros_like(table))


@pytest.mark.spec("SYNC-04")
@pytest.mark.parametrize("given", [False, True])
@ranks(2)
def test_cpu_model_gets_state_of_rank_0(given: bool) -> None:
    options = {"device_id": device()} if given else {}
    model = FSDP(random_tower(seed=dist.get_rank()), sync_module_states=True, **options)
    assert_same(gathered_values(model), plain_values(random_tower(seed=0)), bitwise=True)


@pytest.mark.spec("SYNC-04")
@pytest.mark.accelerator
@ranks(2)
def test_cpu_module_cannot_be_broadcast_by_an_accelerator_backend() -> None:
    with refused(ValueError, "sync_module_states", "device_id"):
        FSDP(tower(), sync_module_states=True)


@pytest.mark.spec("SYNC-05")
@ranks(2)
def test_all_ranks_get_the_checkpoint_that_rank_0_loaded() -> None:
    checkpoint = random_tower(seed=42).state_dict()
    plain = random_tower(seed=7)
    if dist.get_rank() == 0:
        plain.load_state_dict(checkpoint)
    model = by_blocks(plain, sync_module_states=True)
    assert_same(gathered_values(model), checkpoint, bitwise=True)
    loss_of(model(batch())).backward()
    assert len(flat_gradients(model)) == 3


# --- the meta device ---


class Counted(nn.Linear):
    """Counts its initializations, and sets values that depend on the count."""

    num_resets = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1
        if not self.weight.is_meta:
            nn.init.constant_(self.weight, 0.5)
            nn.init.constant_(self.bias, 0.25)


class Table(nn.Module):
    """A module with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH))
        self.num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1
        self.table.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Parent(nn.Sequential):
    """Has no tensors of its own, but could initialize those of its children."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__(*children)
        self.num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def counted() -> nn.Module:
    """Eight modules, four of which have tensors of their own."""
    model = Parent(Counted(WIDTH, WIDTH), Parent(Counted(WIDTH, 3), nn.Tanh(), Counted(3, WIDTH)), Table())
    for module in model.modules():
        if hasattr(module, "num_resets"):
            module.num_resets = 0
    return model


POLICIES: dict[str, Any] = {"one unit": None, "many units": always_wrap_policy}
as_units = pytest.mark.parametrize("units", list(POLICIES))


@pytest.mark.spec("META-01", "META-02", "META-04")
@as_units
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_meta_model_is_materialized_and_each_owner_reset_once(units: str, keep: bool) -> None:
    model = on_meta(counted)
    modules = list(model.modules())
    wrapped = FSDP(model, auto_wrap_policy=POLICIES[units], use_orig_params=keep)
    assert not any(tensor.is_meta for tensor in (*wrapped.parameters(), *wrapped.buffers()))
    assert {tensor.device for tensor in (*wrapped.parameters(), *wrapped.buffers())} == {device()}
    resets = [(type(module), module.num_resets) for module in modules if hasattr(module, "num_resets")]
    assert resets == [(Parent, 0), (Counted, 1), (Parent, 0), (Counted, 1), (Counted, 1), (Table, 1)]
    for name, value in gathered_values(wrapped).items():
        assert torch.equal(value, torch.full_like(value, {"weight": 0.5, "bias": 0.25}.get(name.split(".")[-1], 1.0)))
    assert sum(parameter.numel() for parameter in wrapped.parameters()) < 42 + 21 + 24, "and it is sharded"
    loss_of(wrapped(batch())).backward()
    assert any(parameter.grad is not None for parameter in wrapped.parameters())


@pytest.mark.spec("META-01", "META-02")
@ranks(2)
def test_deferred_initialization_gives_the_values_of_a_model_built_on_the_device() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Embedding(5, 2), nn.LayerNorm(2))

    torch.manual_seed(5)
    plain = layers().to(device())
    torch.manual_seed(5)
    model = FSDP(on_meta(layers))
    if device().type == "cpu":
        assert_same(gathered_values(model), plain_values(plain), bitwise=True)
    assert {name: value.shape for name, value in gathered_values(model).items()} == {
        name: value.shape for name, value in plain_values(plain).items()
    }


@pytest.mark.spec("META-01")
@ranks(2)
def test_buffer_on_the_meta_device_is_materialized_if_all_parameters_are_real() -> None:
    plain = nn.Sequential(Counted(WIDTH, WIDTH).to(device()), on_meta(Table))
    model = FSDP(plain)
    assert torch.equal(model[1].table, torch.ones(WIDTH, device=device()))
    assert model[0].num_resets == 0, "what was real stays as it was"


class Initializer:
    """A ``param_init_fn`` that fills each module's tensors with the module's number in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> None:
        self.calls.append(module)
        module.to_empty(device=device(), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor.data, float(len(self.calls)))


class Filled(nn.Linear):
    """Writes to its parameters in place. Autograd allows this only without grad mode."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight.fill_(0.5)
            self.bias.fill_(0.25)


@pytest.mark.spec("META-02")
@ranks(2)
def test_reset_parameters_may_write_in_place() -> None:
    values = gathered_values(FSDP(on_meta(lambda: nn.Sequential(Filled(WIDTH, 3)))))
    assert {name: float(value.unique()) for name, value in values.items()} == {"0.weight": 0.5, "0.bias": 0.25}


@pytest.mark.spec("META-04")
@as_units
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_materialized_owner_keeps_its_children(units: str, keep: bool) -> None:
    class Owner(Parent):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH, device=device()), Counted(WIDTH, 3))
            self.scale = nn.Parameter(torch.empty(WIDTH, device="meta"))

        def reset_parameters(self) -> None:
            self.num_resets += 1
            nn.init.ones_(self.scale)

    model = Owner()
    real, deferred = model
    model[1] = deferred.to("meta")
    expected = {name: value.detach().clone() for name, value in real.state_dict().items()}
    values = gathered_values(FSDP(model, auto_wrap_policy=POLICIES[units], use_orig_params=keep))
    assert (model.num_resets, deferred.num_resets) == (1, 1)
    for name, value in expected.items():
        assert torch.equal(values[f"0.{name}"], value), "what had values has kept them"
    assert torch.equal(values["1.weight"], torch.full_like(values["1.weight"], 0.5))
    assert torch.equal(values["scale"], torch.ones_like(values["scale"]))


@pytest.mark.spec("META-03", "META-04")
@as_units
@ranks(2)
def test_param_init_fn_is_called_once_per_owner(units: str) -> None:
    model = on_meta(counted)
    modules = list(model.modules())
    owners = [module for module in modules if isinstance(module, (Counted, Table))]
    init = Initializer()
    wrapped = FSDP(model, auto_wrap_policy=POLICIES[units], param_init_fn=init)
    assert Counter(map(id, init.calls)) == Counter(map(id, owners))
    assert all(module.num_resets == 0 for module in modules if hasattr(module, "num_resets"))
    values = {float(value.unique()) for value in gathered_values(wrapped).values()}
    assert values == {1.0, 2.0, 3.0, 4.0}


@pytest.mark.spec("META-05")
@pytest.mark.parametrize("owns", ["a parameter", "a buffer"])
@ranks(2)
def test_class_without_reset_parameters_is_named(owns: str) -> None:
    class Speechless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if owns == "a parameter":
                self.scale = nn.Parameter(torch.ones(3))
            else:
                self.register_buffer("scale", torch.ones(3))

    model = nn.Sequential(nn.Linear(2, 2), on_meta(Speechless))
    with refused(RuntimeError, "Speechless", "'1'", "reset_parameters", "param_init_fn"):
        FSDP(model, sync_module_states=True)


@pytest.mark.spec("META-05", "META-03")
@ranks(2)
def test_an_init_that_leaves_something_on_the_meta_device_is_refused() -> None:
    with refused(RuntimeError, "Linear", "weight", "param_init_fn", "to_empty"):
        FSDP(on_meta(lambda: nn.Linear(2, 2)), param_init_fn=lambda module: None, sync_module_states=True)


@pytest.mark.spec("META-06")
@ranks(2)
def test_param_init_fn_gets_only_owners_of_meta_tensors() -> None:
    class Speechless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    def build() -> nn.Module:
        return nn.ModuleDict(
            {
                "norm": nn.BatchNorm1d(3),
                "list": nn.ModuleList([nn.Linear(3, 3), nn.ReLU(), nn.Sequential(Speechless())]),
                "table": Table(),
                "unit": nn.Linear(3, 3),
                "ignored": nn.Sequential(nn.Linear(3, 3)),
            }
        )

    model = on_meta(build)
    model["real"] = nn.Linear(3, 3, device=device())
    before = model["real"].weight.detach().clone()
    inner = Initializer()
    model["unit"] = FSDP(model["unit"], param_init_fn=inner)
    assert [type(module) for module in inner.calls] == [nn.Linear]
    init = Initializer()
    with pytest.warns(UserWarning, match="containers that do not implement forward"):
        wrapped = FSDP(model, param_init_fn=init, ignored_modules=[model["ignored"]])
    assert [type(module) for module in init.calls] == [nn.BatchNorm1d, nn.Linear, Speechless, Table]
    assert model["ignored"][0].weight.is_meta, "somebody else's business"
    with FSDP.summon_full_params(wrapped):
        assert torch.equal(wrapped["real"].weight, before)


@pytest.mark.spec("META-06")
@ranks(2)
def test_default_initialization_skips_wrapped_and_ignored_modules() -> None:
    model = nn.Sequential(*(on_meta(lambda: Counted(3, 3)) for _ in range(3)))
    layers = list(model)
    model[0] = FSDP(layers[0])
    FSDP(model, ignored_modules=[layers[1]])
    assert [layer.num_resets for layer in layers] == [1, 0, 1]
    assert layers[1].weight.is_meta


@pytest.mark.spec("META-07")
@ranks(2)
def test_without_meta_tensors_param_init_fn_is_never_called() -> None:
    init = Initializer()
    plain = random_tower(seed=3)
    expected = plain_values(copy.deepcopy(plain))
    model = by_blocks(plain, param_init_fn=init)
    assert init.calls == []
    assert_same(gathered_values(model), expected, bitwise=True)


@pytest.mark.spec("META-08")
@pytest.mark.parametrize("wrong", ["a string", "a flag", "a tensor"])
@ranks(2)
def test_a_param_init_fn_that_is_not_callable_is_refused(wrong: str) -> None:
    given: Any = {"a string": "init", "a flag": True, "a tensor": torch.ones(1)}[wrong]
    with refused(ValueError, "param_init_fn", "callable", repr(given)):
        FSDP(on_meta(counted), param_init_fn=given, sync_module_states=True)


@pytest.mark.spec("META-10")
@ranks(2)
def test_policy_units_are_materialized_and_sharded_one_after_the_other() -> None:
    model = on_meta(Stack)
    paths = {module: path for path, module in model.named_modules()}
    calls: list[tuple[str, int, int]] = []

    def init(module: nn.Module) -> None:
        num_real = sum(not p.is_meta and p.dim() == 2 for p in model.parameters())
        calls.append((paths[module], len(FSDP.fsdp_modules(model)), num_real))
        module.to_empty(device=device(), recurse=False)
        module.reset_parameters()

    sharded = wrapped(model, param_init_fn=init)
    # Each entry has the path, the number of units already sharded, and the number of unsharded weights in memory.
    assert calls == [*((f"blocks.{index}.linear", index, 0) for index in range(4)), ("enter", 4, 0), ("leave", 4, 1)]
    first = next(sharded.parameters())
    assert first.device == device()
    assert not first.is_meta
    iterate(sharded)


@pytest.mark.spec("META-10")
@ranks(2)
def test_each_unit_is_materialized_in_the_trace_before_the_next_one() -> None:
    with trace.record() as recorder:

        def init(module: nn.Module) -> None:
            recorder.begin("MADE", type(module).__name__)
            module.to_empty(device=device(), recurse=False)
            module.reset_parameters()

        wrapped(on_meta(Stack), param_init_fn=init, sync_module_states=True)
    once = ["MADE Linear", "BCAST Block"]
    assert recorder.order() == [*once * 4, "MADE Linear", "MADE Linear", "BCAST Stack"]


@pytest.mark.spec("META-10")
@pytest.mark.accelerator
@ranks(2)
def test_a_meta_model_is_never_in_full_size_on_the_device() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    full = sum(parameter.nbytes for parameter in model.parameters())
    accelerator = torch.get_device_module(device())
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert accelerator.max_memory_allocated() - before < 0.9 * full
    assert next(wrapped.parameters()).device == device()


@pytest.mark.spec("META-11")
@pytest.mark.parametrize("own_init", [False, True])
@ranks(2)
def test_random_values_differ_between_ranks_unless_they_are_sent(own_init: bool) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    def initial_values(rank: int, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(100 + rank)
        init_option = {"param_init_fn": init} if own_init else {}
        return dict(flat_parameters(wrapped(on_meta(Stack), **init_option, **options)))

    mine = initial_values(dist.get_rank())
    as_rank_0 = initial_values(0)
    together = initial_values(dist.get_rank(), sync_module_states=True)
    for unit, flat in mine.items():
        assert torch.equal(flat, as_rank_0[unit]) is (dist.get_rank() == 0)
        assert torch.equal(together[unit], as_rank_0[unit])


# --- torchdistX ---


def is_fake(tensor: Tensor) -> bool:
    return getattr(tensor, "stands_for_nothing", False)


def materialize_module(
    module: nn.Module, buffers_only: bool = False, check_fn: Callable[[nn.Module], bool] | None = None
) -> None:
    """Like torchdistX's: children first, then the module's own tensors, unless ``check_fn`` returns False."""
    for child in module.children():
        materialize_module(child, buffers_only, check_fn)
    if check_fn is not None and not check_fn(module):
        return
    for name, parameter in () if buffers_only else list(module._parameters.items()):
        if parameter is not None and is_fake(parameter):
            module._parameters[name] = nn.Parameter(torch.full_like(parameter, 3.0))
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and is_fake(buffer):
            module._buffers[name] = torch.full_like(buffer, 3.0)


@contextmanager
def torchdistx() -> Iterator[None]:
    """The used part of torchdistX, which can be imported inside the block."""
    package, fake, deferred = (types.ModuleType(f"torchdistx{part}") for part in ("", ".fake", ".deferred_init"))
    fake.is_fake = is_fake  # type: ignore[attr-defined]
    deferred.materialize_module = materialize_module  # type: ignore[attr-defined]
    package.fake, package.deferred_init = fake, deferred  # type: ignore[attr-defined]
    package.__path__ = []  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {module.__name__: module for module in (package, fake, deferred)}):
        yield


def deferred_init(build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose tensors look real but hold meaningless values."""
    model = build().to(device())
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.full_like(tensor, -1.0)
        tensor.stands_for_nothing = True
    return model


@pytest.mark.spec("META-09")
@as_units
@ranks(2)
def test_a_deferred_model_is_materialized_by_torchdistx(units: str) -> None:
    with torchdistx():
        model = FSDP(deferred_init(lambda: nn.Sequential(nn.Linear(2, 4), Table())), auto_wrap_policy=POLICIES[units])
    for value in gathered_values(model).values():
        assert torch.equal(value, torch.full_like(value, 3.0))


@pytest.mark.spec("META-09")
@as_units
@ranks(2)
def test_a_deferred_model_is_initialised_by_param_init_fn_if_there_is_one(units: str) -> None:
    init = Initializer()
    with torchdistx():
        plain = deferred_init(lambda: nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)))
        layers = list(plain)
        model = FSDP(plain, auto_wrap_policy=POLICIES[units], param_init_fn=init)
    assert init.calls == layers
    assert {float(value.unique()) for value in gathered_values(model).values()} == {1.0, 2.0}
