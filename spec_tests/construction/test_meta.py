"""Models that are built on the meta device or with torchdistX: when their tensors get memory and values."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
from spec_tests.models.values import assert_same, flat_parameters
from spec_tests.models.whole import gathered_values, plain_values
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, always_wrap_policy, trace

FSDP = FullyShardedDataParallel


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
    assert sum(parameter.numel() for parameter in wrapped.parameters()) < 42 + 21 + 24, "the module is sharded"
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
    assert model[0].num_resets == 0, "parameters with values are not changed"


class Initializer:
    """A ``param_init_fn`` that fills each module's tensors with the module's number in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> None:
        self.calls.append(module)
        module.to_empty(device=device(), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor.data, float(len(self.calls)))


@pytest.mark.spec("META-02", "META-04")
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
            # In place. Autograd allows this only without grad mode.
            self.scale.fill_(1.0)

    model = Owner()
    real, deferred = model
    model[1] = deferred.to("meta")
    expected = {name: value.detach().clone() for name, value in real.state_dict().items()}
    values = gathered_values(FSDP(model, auto_wrap_policy=POLICIES[units], use_orig_params=keep))
    assert (model.num_resets, deferred.num_resets) == (1, 1)
    for name, value in expected.items():
        assert torch.equal(values[f"0.{name}"], value), "parameters with values keep them"
    assert torch.equal(values["1.weight"], torch.full_like(values["1.weight"], 0.5))
    assert torch.equal(values["scale"], torch.ones_like(values["scale"]))


@pytest.mark.spec("META-03", "META-04", "META-06")
@as_units
@ranks(2)
def test_param_init_fn_is_called_once_for_every_module(units: str) -> None:
    model = on_meta(counted)
    modules = list(model.modules())
    init = Initializer()
    wrapped = FSDP(model, auto_wrap_policy=POLICIES[units], param_init_fn=init)
    # With one unit for each module, the units of a `Parent` and of the `Tanh` have nothing on the meta device.
    owners = [module for module in modules if isinstance(module, (Counted, Table))]
    assert Counter(map(id, init.calls)) == Counter(map(id, modules if units == "one unit" else owners))
    assert all(module.num_resets == 0 for module in modules if hasattr(module, "num_resets"))
    values = {float(value.unique()) for value in gathered_values(wrapped).values()}
    assert len(values) == 4


class Speechless(nn.Module):
    """Has a tensor and no ``reset_parameters``."""

    def __init__(self, owns: str = "a parameter") -> None:
        super().__init__()
        if owns == "a parameter":
            self.scale = nn.Parameter(torch.ones(3))
        else:
            self.register_buffer("scale", torch.ones(3))


@pytest.mark.spec("META-05")
@pytest.mark.parametrize("owns", ["a parameter", "a buffer"])
@ranks(2)
def test_class_without_reset_parameters_is_named(owns: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: Speechless(owns)))
    with refused(RuntimeError, "Speechless", "'1'", "reset_parameters", "param_init_fn"):
        FSDP(model, sync_module_states=True)


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


@pytest.mark.spec("META-06")
@ranks(2)
def test_param_init_fn_gets_containers_and_owners_of_meta_tensors_but_no_module_that_has_values() -> None:
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
    outer = [nn.ModuleDict, nn.BatchNorm1d, nn.ModuleList, Table]
    assert [type(module) for module in init.calls] == [*outer, nn.Linear, nn.ReLU, nn.Sequential, Speechless]
    assert model["ignored"][0].weight.is_meta, "other modules are not initialized"
    with FSDP.summon_full_params(wrapped):
        assert torch.equal(wrapped["real"].weight, before)


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


def memory_of_all_then_each(module: nn.Module) -> None:
    """Allocates a module with everything in it. Each module then fills its own tensors."""
    module.to_empty(device=device())
    fill(module)


def memory_by_the_outermost(module: nn.Module) -> None:
    if any(tensor.is_meta for tensor in module.parameters()):
        module.to_empty(device=device())
    fill(module)


@pytest.mark.spec("META-03", "META-06")
@pytest.mark.parametrize("init", [each_module, the_container, memory_of_all_then_each, memory_by_the_outermost])
@pytest.mark.parametrize("units", ["one unit", "a unit for each block"])
@pytest.mark.cpu
@ranks(2)
def test_an_initializer_is_called_for_the_modules_and_gives_the_values_of_torch(
    init: Callable[[nn.Module], None], units: str
) -> None:
    def initialized(wrapper: Any) -> tuple[list[str], dict[str, Tensor]]:
        model = on_meta(lambda: nn.Sequential(NormedBlock(), nn.Sequential(NormedBlock(), nn.ReLU())))
        paths = {module: path for path, module in model.named_modules()}
        calls: list[str] = []

        def recorded(module: nn.Module) -> None:
            calls.append(paths[module])
            init(module)

        torch.manual_seed(3)
        policy = None if units == "one unit" else torch_fsdp.wrap.ModuleWrapPolicy({NormedBlock})
        model = wrapper(model, param_init_fn=recorded, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        with wrapper.summon_full_params(model):
            return calls, {name: value.detach().clone() for name, value in flat_parameters_of(model)}

    calls, values = initialized(FSDP)
    expected_calls, expected = initialized(torch_fsdp.FullyShardedDataParallel)
    assert calls == expected_calls
    assert_same(values, expected, bitwise=True)


def flat_parameters_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The unsharded parameters in order, whose names inside the context do not differ."""
    return [(name.replace("_fsdp_wrapped_module.", ""), value) for name, value in model.named_parameters()]


@pytest.mark.spec("META-02")
@pytest.mark.cpu
@ranks(2)
def test_default_initialization_gives_the_random_values_of_torch() -> None:
    def layers() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 2)))
        return nn.Sequential(inner, nn.Linear(3, 4))

    torch.manual_seed(5)
    values = gathered_values(FSDP(on_meta(layers)))
    torch.manual_seed(5)
    model = torch_fsdp.FullyShardedDataParallel(on_meta(layers), device_id=torch.device("cpu"))
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(model):
        assert_same(values, dict(flat_parameters_of(model)), bitwise=True)


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
    model = wrapped(seeded(lambda: nn.Sequential(NormedBlock(), NormedBlock())), param_init_fn=init)
    assert init.calls == []
    expected = seeded(lambda: nn.Sequential(NormedBlock(), NormedBlock()))
    assert_same(gathered_values(model), plain_values(expected), bitwise=True)


@pytest.mark.spec("META-08")
@ranks(2)
def test_a_param_init_fn_that_is_not_callable_is_refused() -> None:
    for given in ("init", True, torch.ones(1)):
        with refused(ValueError, "param_init_fn", "callable", repr(given)):
            FSDP(on_meta(counted), param_init_fn=given, sync_module_states=True)


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
    assert calls == [
        *((f"blocks.{index}.linear", index, index, 0) for index in range(4)),
        ("enter", 4, 4, 0),
        ("leave", 4, 4, 1),
    ]
    assert recorder.order("BCAST") == [*["BCAST Block"] * 4, "BCAST Stack"]
    assert {parameter.device for parameter in sharded.parameters()} == {device()}
    iterate(sharded)


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
    expected = [plain, *layers] if units == "one unit" else layers
    assert init.calls == expected
    # The value of a layer is the number of its call.
    numbers = {float(expected.index(layer) + 1) for layer in layers}
    assert {float(value.unique()) for value in gathered_values(model).values()} == numbers
