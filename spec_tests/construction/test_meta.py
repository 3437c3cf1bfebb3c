"""Models that are built on the meta device or with torchdistX: when their tensors get memory and values."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, NormedBlock, Stack, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import wrapped
from spec_tests.models.values import assert_same, flat_parameters, full_values
from spec_tests.models.whole import by_name, gathered_values, plain_values
from spec_tests.subject import FullyShardedDataParallel, always_wrap_policy, trace

FSDP = FullyShardedDataParallel
TorchFSDP = torch_fsdp.FullyShardedDataParallel


class Counted(nn.Linear):
    """Counts its initializations, and sets values that show that there was one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_resets = -1  # the constructor of a linear layer calls it once
        super().__init__(*args, **kwargs)

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

    num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


POLICIES: dict[str, Any] = {"one unit": None, "many units": always_wrap_policy}
as_units = pytest.mark.parametrize("units", list(POLICIES))
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])


# --- the default ---


@pytest.mark.spec("META-01", "META-02", "META-04")
@as_units
@flat_or_original
@ranks(2)
def test_meta_model_is_materialized_and_each_owner_reset_once(units: str, keep: bool) -> None:
    model = on_meta(lambda: Parent(Counted(WIDTH, 3), Parent(nn.Tanh(), Counted(3, WIDTH)), Table()))
    modules = list(model.modules())
    wrapper = FSDP(model, auto_wrap_policy=POLICIES[units], use_orig_params=keep)
    assert {tensor.device for tensor in (*wrapper.parameters(), *wrapper.buffers())} == {device()}
    resets = [(type(module), module.num_resets) for module in modules if not isinstance(module, nn.Tanh)]
    assert resets == [(Parent, 0), (Counted, 1), (Parent, 0), (Counted, 1), (Table, 1)]
    for name, value in gathered_values(wrapper).items():
        assert torch.equal(value, torch.full_like(value, {"weight": 0.5, "bias": 0.25}.get(name.split(".")[-1], 1.0)))
    assert sum(parameter.numel() for parameter in wrapper.parameters()) < 21 + 24, "the module is sharded"
    loss_of(wrapper(batch())).backward()
    assert any(parameter.grad is not None for parameter in wrapper.parameters())


@pytest.mark.spec("META-01", "META-02")
@pytest.mark.cpu
@ranks(2)
def test_default_initialization_gives_the_random_values_of_torch() -> None:
    def layers() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Embedding(5, 2)))
        return nn.Sequential(inner, nn.Linear(3, 4))

    torch.manual_seed(5)
    values = full_values(FSDP(on_meta(layers)))
    torch.manual_seed(5)
    theirs = TorchFSDP(on_meta(layers), device_id=torch.device("cpu"))
    with TorchFSDP.summon_full_params(theirs):
        assert_same(values, by_name(theirs), bitwise=True)


@pytest.mark.spec("META-01")
@ranks(2)
def test_buffer_on_the_meta_device_is_materialized_if_all_parameters_are_real() -> None:
    model = FSDP(nn.Sequential(Counted(WIDTH, WIDTH, device=device()), on_meta(Table)))
    assert torch.equal(model[1].table, torch.ones(WIDTH, device=device()))
    assert model[0].num_resets == 0, "parameters with values are not changed"


class Owner(Parent):
    """Two layers and a parameter on the meta device."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, device=device()), Counted(WIDTH, 3, device="meta"))
        self.scale = nn.Parameter(torch.empty(WIDTH, device="meta"))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # In place. Autograd allows this only without grad mode.
        self.scale.fill_(1.0)


@pytest.mark.spec("META-02", "META-04")
@as_units
@flat_or_original
@ranks(2)
def test_materialized_owner_keeps_its_children(units: str, keep: bool) -> None:
    model = Owner()
    real, deferred = model
    expected = plain_values(real)
    values = gathered_values(FSDP(model, auto_wrap_policy=POLICIES[units], use_orig_params=keep))
    assert (model.num_resets, deferred.num_resets) == (1, 1)
    assert_same({name: values[f"0.{name}"] for name in expected}, expected, bitwise=True)
    assert torch.equal(values["1.weight"], torch.full_like(values["1.weight"], 0.5))
    assert torch.equal(values["scale"], torch.ones_like(values["scale"]))


class Speechless(nn.Module):
    """Has a tensor and no ``reset_parameters``."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3) if is_buffer else None)
        self.register_parameter("weight", None if is_buffer else nn.Parameter(torch.ones(3)))


@pytest.mark.spec("META-05")
@pytest.mark.parametrize("is_buffer", [False, True])
@ranks(2)
def test_class_without_reset_parameters_is_named(is_buffer: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: Speechless(is_buffer)))
    with refused(RuntimeError, "Speechless", "'1'", "reset_parameters", "param_init_fn"):
        FSDP(model, sync_module_states=True)


# --- param_init_fn ---


class Initializer:
    """A ``param_init_fn`` that fills each module's tensors with the module's number in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> None:
        self.calls.append(module)
        module.to_empty(device=device(), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor.data, float(len(self.calls)))


@pytest.mark.spec("META-06")
@pytest.mark.parametrize("has_init", [False, True])
@ranks(2)
def test_wrapped_and_ignored_modules_and_those_with_values_are_not_initialized(has_init: bool) -> None:
    in_unit, ignored, deferred = (Counted(3, 3, device="meta") for _ in range(3))
    real = Counted(3, 3, device=device())
    model = nn.Sequential(FSDP(in_unit), ignored, deferred, real)
    init = Initializer()
    wrapper = FSDP(model, ignored_modules=[ignored], param_init_fn=init if has_init else None)
    assert init.calls == ([model, deferred] if has_init else [])
    assert [layer.num_resets for layer in (in_unit, ignored, deferred, real)] == [1, 0, 0 if has_init else 1, 0]
    assert ignored.weight.is_meta
    with FSDP.summon_full_params(wrapper):
        assert (real.weight == 0.5).all(), "the values of the constructor"


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def each_module(module: nn.Module) -> None:
    module.to_empty(device=device(), recurse=False)
    fill(module)


def the_container(module: nn.Module) -> None:
    """Initializes the layers of a block together, as models with a method `init_weights` do."""
    if isinstance(module, NormedBlock):
        module.to_empty(device=device())
        module.apply(fill)


def memory_by_the_outermost(module: nn.Module) -> None:
    if any(tensor.is_meta for tensor in module.parameters()):
        module.to_empty(device=device())
    fill(module)


@pytest.mark.spec("META-03", "META-04", "META-06")
@pytest.mark.parametrize("init", [each_module, the_container, memory_by_the_outermost])
@pytest.mark.parametrize("units", ["one unit", "a unit for each block"])
@pytest.mark.cpu
@ranks(2)
def test_an_initializer_is_called_for_the_modules_and_gives_the_values_of_torch(
    init: Callable[[nn.Module], None], units: str
) -> None:
    policy = None if units == "one unit" else torch_fsdp.wrap.ModuleWrapPolicy({NormedBlock})
    found = []
    for wrapper in (FSDP, TorchFSDP):
        model = on_meta(lambda: nn.Sequential(NormedBlock(), nn.Sequential(NormedBlock(), nn.ReLU())))
        paths = {module: path for path, module in model.named_modules()}
        calls: list[str] = []

        def recorded(module: nn.Module, paths: Any = paths, calls: Any = calls) -> None:
            calls.append(paths[module])
            init(module)

        torch.manual_seed(3)
        model = wrapper(model, param_init_fn=recorded, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        with wrapper.summon_full_params(model):
            found.append((calls, {name: value.detach().clone() for name, value in by_name(model).items()}))
    (ours, values), (theirs, expected) = found
    assert ours == theirs
    assert_same(values, expected, bitwise=True)


@pytest.mark.spec("META-01", "META-03", "META-05")
@ranks(2)
def test_an_init_that_leaves_something_on_the_meta_device_is_refused() -> None:
    def fill_parameters_only(module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.ones(parameter.shape, device=device()))

    with refused(RuntimeError, "Linear", "weight", "param_init_fn", "to_empty"):
        FSDP(on_meta(lambda: nn.Linear(2, 2)), param_init_fn=lambda module: None, sync_module_states=True)
    with refused(RuntimeError, "'running_mean'", "module '1' (BatchNorm1d)"):
        FSDP(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), param_init_fn=fill_parameters_only)


@pytest.mark.spec("META-07")
@ranks(2)
def test_without_meta_tensors_param_init_fn_is_never_called() -> None:
    init = Initializer()
    model = wrapped(seeded(NormedBlock), param_init_fn=init)
    assert init.calls == []
    assert_same(gathered_values(model), plain_values(seeded(NormedBlock)), bitwise=True)


@pytest.mark.spec("META-08")
@ranks(2)
def test_a_param_init_fn_that_is_not_callable_is_refused() -> None:
    for given in ("init", True, torch.ones(1)):
        with refused(ValueError, "param_init_fn", "callable", repr(given)):
            FSDP(on_meta(lambda: Counted(3, 3)), param_init_fn=given, sync_module_states=True)


# --- several units, several ranks ---


@pytest.mark.spec("META-10")
@ranks(2)
def test_policy_units_are_materialized_sent_and_sharded_one_after_the_other() -> None:
    model = on_meta(Stack)
    paths = {module: path for path, module in model.named_modules()}
    calls: list[tuple[str, int, int, int]] = []

    def init(module: nn.Module) -> None:
        if not hasattr(module, "reset_parameters"):
            return
        num_real = sum(not p.is_meta and p.dim() == 2 for p in model.parameters())
        calls.append((paths[module], len(FSDP.fsdp_modules(model)), recorder.count("BCAST"), num_real))
        module.to_empty(device=device(), recurse=False)
        module.reset_parameters()

    with trace.record() as recorder:
        sharded = wrapped(model, param_init_fn=init, sync_module_states=True)
    # Each entry has the path, the number of units already sharded, the number of broadcasts, and the number of
    # unsharded weights in memory.
    blocks = [(f"blocks.{index}.linear", index, index, 0) for index in range(4)]
    assert calls == [*blocks, ("enter", 4, 4, 0), ("leave", 4, 4, 1)]
    assert recorder.order("BCAST") == [*["BCAST Block"] * 4, "BCAST Stack"]
    assert {parameter.device for parameter in sharded.parameters()} == {device()}
    iterate(sharded)


@pytest.mark.spec("META-11")
@pytest.mark.parametrize("options", [{}, {"param_init_fn": each_module}], ids=["default", "own function"])
@ranks(2)
def test_random_values_differ_between_ranks_unless_they_are_sent(options: dict[str, Any]) -> None:
    def initial_values(rank: int, **sync: bool) -> Tensor:
        torch.manual_seed(100 + rank)
        return flat_parameters(wrapped(on_meta(Stack), **options, **sync))["blocks.1"]

    as_rank_0 = initial_values(0)
    assert torch.equal(initial_values(dist.get_rank()), as_rank_0) is (dist.get_rank() == 0)
    assert torch.equal(initial_values(dist.get_rank(), sync_module_states=True), as_rank_0)


# --- torchdistX ---


def is_fake(tensor: Tensor) -> bool:
    return getattr(tensor, "is_fake", False)


def materialize_module(module: nn.Module) -> None:
    """Like torchdistX's: gives memory and values to a module and everything inside it."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if is_fake(parameter):
                owner._parameters[name] = nn.Parameter(torch.full_like(parameter, 3.0))


@pytest.mark.spec("META-09")
@pytest.mark.parametrize("has_init", [False, True])
@as_units
@ranks(2)
def test_a_deferred_model_is_initialized_by_param_init_fn_or_torchdistx(units: str, has_init: bool) -> None:
    plain = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).to(device())
    for tensor in plain.parameters():
        tensor.is_fake = True  # It has no values, although it is not on the meta device.
    fake, deferred_init = types.ModuleType("torchdistx.fake"), types.ModuleType("torchdistx.deferred_init")
    fake.is_fake = is_fake  # type: ignore[attr-defined]
    deferred_init.materialize_module = materialize_module  # type: ignore[attr-defined]
    layers, init = list(plain), Initializer()
    with pytest.MonkeyPatch.context() as patch:
        for module in (types.ModuleType("torchdistx"), fake, deferred_init):
            patch.setitem(sys.modules, module.__name__, module)
        model = FSDP(plain, auto_wrap_policy=POLICIES[units], param_init_fn=init if has_init else None)
    expected = [plain, *layers] if units == "one unit" else layers
    assert init.calls == (expected if has_init else [])
    # The value of a layer is the number of its call.
    numbers = {float(expected.index(layer) + 1) for layer in layers} if has_init else {3.0}
    assert {float(value.unique()) for value in gathered_values(model).values()} == numbers
