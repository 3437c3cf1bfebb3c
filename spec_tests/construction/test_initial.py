"""Initial values and their device: device selection, and synchronization from rank 0."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from minifsdp.cases.containers import move
from minifsdp.fsdp1 import build, initial
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, NormedBlock, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, HYBRID_SHARD, grid, wrapped
from spec_tests.models.values import assert_same, flat_gradients, flat_parameters, named
from spec_tests.models.whole import assert_a_step_uses_the_mean_gradient_alone, gathered_values, plain_values
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, trace

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


# --- device selection ---


class Elsewhere(nn.Module):
    """Reports parameters on any given devices, also on devices that this machine does not have."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.spec("DEV-01", "DEV-02", "DEV-09")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_a_model_trains_with_and_without_a_device_id(given: bool, strategy: ShardingStrategy) -> None:
    model = wrapped(device_id=device() if given else None, sharding_strategy=strategy)
    assert {unit.compute_device for unit in FSDP.fsdp_modules(model)} == {device()}
    assert_a_step_uses_the_mean_gradient_alone(model, seeded())
    assert {parameter.device for parameter in model.parameters()} == {device()}


@pytest.mark.spec("DEV-01")
@pytest.mark.accelerator
@ranks(2)
def test_an_index_selects_the_accelerator() -> None:
    model = wrapped(Stack(), device_id=device().index)
    assert {parameter.device for parameter in model.parameters()} == {device()}


@pytest.mark.spec("DEV-02", "DEV-10")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("places", "device_id", "expected"),
    [
        (("cuda:3", "cuda:3"), None, "cuda:3"),
        (("cuda:3",), "cuda:3", "cuda:3"),
        (("cpu",), "cpu", "cpu"),
        (("cpu", "cuda:0"), "cuda:0", "cuda:0"),
        # The meta device does not count, because its tensors can move to any device.
        (("meta", "cuda:0"), None, "cuda:0"),
    ],
)
def test_compute_device_is_the_one_of_the_module_or_the_given_one(
    places: tuple[str, ...], device_id: str | None, expected: str
) -> None:
    given = None if device_id is None else torch.device(device_id)
    assert build.compute_device(Elsewhere(*places), given) == torch.device(expected)


@pytest.mark.spec("DEV-06", "DEV-10")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("places", "device_id", "error", "message"),
    [
        (("cuda:0", "cuda:0"), "cuda:1", ValueError, r"rank 0: .*cuda:1.*cuda:0"),
        (("cuda:0",), "cpu", ValueError, r"cpu.*cuda:0"),
        (("cpu", "cuda:0"), None, RuntimeError, r"rank 0: .*several devices.*(cpu.*cuda:0|cuda:0.*cpu)"),
        (("cuda:0", "cuda:1"), None, RuntimeError, r"cuda:0.*cuda:1"),
        (("cuda:0", "cuda:1"), "cuda:0", RuntimeError, r"cuda:0.*cuda:1"),
        (("cuda:0", "cuda:1"), "cpu", RuntimeError, r"cuda:0.*cuda:1"),
    ],
)
def test_module_on_another_device_or_on_several_devices_is_refused(
    places: tuple[str, ...], device_id: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build.compute_device(Elsewhere(*places), None if device_id is None else torch.device(device_id))


@pytest.mark.spec("DEV-03")
@pytest.mark.accelerator
@ranks(2)
def test_cpu_module_is_initialized_there_and_computes_on_the_current_device_with_a_warning() -> None:
    computed_on: list[torch.device] = []
    plain = tower()
    for layer in plain:
        layer.register_forward_hook(lambda module, args, output: computed_on.append(output.device))
    with pytest.warns(UserWarning, match="device_id"):
        model = wrapped(plain)
    iterate(model)
    assert computed_on == [device()] * 4
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device()}


@pytest.mark.spec("DEV-04")
@ranks(2)
def test_with_device_id_parameters_and_buffers_are_on_that_device_after_construction() -> None:
    plain = tower()
    buffers = dict(plain.named_buffers())
    model = wrapped(plain, device_id=device())
    assert {parameter.device for parameter in model.parameters()} == {device()}
    assert {buffer.device for buffer in model.buffers()} == {device()}
    if device().type == "cpu":
        assert all(after is buffers[name] for name, after in buffers_of(model).items()), "the same objects"
    loss_of(model(batch())).backward()


@pytest.mark.spec("DEV-05", "DEV-04")
@ranks(2)
def test_units_are_moved_and_sharded_one_by_one_from_inner_to_outer() -> None:
    model = seeded()
    calls: list[tuple[list[str], int]] = []
    paths = {module: path for path, module in model.named_modules()}

    def noting(modules: Any, *args: Any, **kwargs: Any) -> None:
        owners = [paths[module] for _, module in modules if module._parameters]
        calls.append((owners, len(FSDP.fsdp_modules(model))))
        original(modules, *args, **kwargs)

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


@pytest.mark.spec("DEV-01")
@ranks(2)
def test_the_meta_device_is_refused() -> None:
    with refused(ValueError, "device_id is the meta device", "param_init_fn"):
        wrapped(device_id="meta")


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
    record = {"x": torch.ones(3, dtype=torch.int64), "y": (torch.ones(1), "word", None)}
    args = (torch.ones(2), [record], Pair(1, [2.5]))
    (moved, structure), (given, expected_structure) = tree_flatten(move(torch.device("meta"), args)), tree_flatten(args)
    assert structure == expected_structure
    for one, other in zip(moved, given, strict=True):
        if isinstance(other, Tensor):
            assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)
            assert other.device.type == "cpu", "the caller's own tensor is not changed"
        else:
            assert one == other
    assert move(torch.device("cpu"), args[0]) is args[0], "a tensor that is already on the device is not copied"


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
        model = wrapped(mine, **options)
    assert recorder.count("BCAST") == 0
    assert num_broadcasts(wire) == 0
    for unit, flat in flat_parameters(model).items():
        # The root has all parameters that are not in a block.
        beginnings = f"{unit}." if unit else ("0.", "3.")
        row = torch.cat([p.reshape(-1) for name, p in named(expected).items() if name.startswith(beginnings)])
        assert torch.equal(flat.detach(), row.chunk(2)[dist.get_rank()])
    assert_same(buffers_of(model), dict(expected.named_buffers()), bitwise=True)


def num_broadcasts(wire: Wire) -> int:
    return sum(kind == "broadcast_" for kind, _ in wire.sent)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}


@pytest.mark.spec("SYNC-02", "SYNC-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_with_sync_every_rank_has_the_parameters_and_buffers_of_rank_0(strategy: ShardingStrategy, keep: bool) -> None:
    model = wrapped(
        random_tower(seed=dist.get_rank()), sync_module_states=True, sharding_strategy=strategy, use_orig_params=keep
    )
    values = gathered_values(model)
    assert_same(values, plain_values(random_tower(seed=0)), bitwise=True)
    assert len(dict(model.named_buffers())) == 9


@pytest.mark.spec("SYNC-02")
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64], ids=str)
@ranks(2)
def test_with_sync_buffers_have_any_dtype(dtype: torch.dtype) -> None:
    plain = nn.Linear(2, 2)
    plain.register_buffer("table", torch.tensor([0, dist.get_rank(), 1 - dist.get_rank()]).to(dtype))
    model = FullyShardedDataParallel(plain, sync_module_states=True, device_id=device())
    assert model.table.to(torch.complex64).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.spec("SYNC-02")
@ranks(4)
def test_with_sync_a_hybrid_has_one_source_for_all_its_ranks() -> None:
    options = {"sharding_strategy": HYBRID_SHARD, "process_group": grid()}
    model = wrapped(random_tower(seed=dist.get_rank()), sync_module_states=True, **options)
    assert_same(gathered_values(model), plain_values(random_tower(seed=0)), bitwise=True)


@pytest.mark.spec("SYNC-02")
@ranks(4)
def test_with_sync_the_source_is_the_first_rank_of_the_units_own_group() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    model = wrapped(random_tower(seed=dist.get_rank()), sync_module_states=True, process_group=mine)
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
        wrapped(random_tower(seed=0), sync_module_states=True)
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
@pytest.mark.accelerator
@ranks(2)
def test_cpu_module_cannot_be_broadcast_by_an_accelerator_backend() -> None:
    with refused(ValueError, "sync_module_states", "device_id"):
        FSDP(tower(), sync_module_states=True)


@pytest.mark.spec("SYNC-04", "SYNC-05")
@pytest.mark.parametrize("given", [False, True])
@ranks(2)
def test_all_ranks_get_the_checkpoint_that_rank_0_loaded(given: bool) -> None:
    checkpoint = random_tower(seed=42).state_dict()
    plain = random_tower(seed=7)
    if dist.get_rank() == 0:
        plain.load_state_dict(checkpoint)
    model = wrapped(plain, sync_module_states=True, device_id=device() if given else None)
    assert_same(gathered_values(model), checkpoint, bitwise=True)
    loss_of(model(batch())).backward()
    assert len(flat_gradients(model)) == 3
