"""Models that are built on the meta device or with torchdistX: when their tensors get memory and values."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.testing import assert_close

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models import modules
from spec_tests.models.arrangement import LanguageModel
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import always_wrap_policy, trace

flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
as_units = pytest.mark.parametrize("policy", [None, always_wrap_policy], ids=["one unit", "many units"])


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


class Counted(nn.Linear):
    """Counts its initializations, and sets values that show that there was one."""

    num_resets = -1  # the constructor of a linear layer calls it once

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.num_resets += 1
        if not self.weight.is_meta:
            self.weight.fill_(0.5)
            self.bias.fill_(0.25)


class Parent(nn.Sequential):
    """Could initialize the tensors of its children. It has a parameter of its own only if the test registers one."""

    num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1
        for parameter in self.parameters(recurse=False):
            # In place. Autograd allows this only without grad mode.
            parameter.fill_(1.0)


# --- the default ---


@pytest.mark.spec("META-01", "META-02", "META-04")
@as_units
@flat_or_original
@ranks(2)
def test_materialized_owner_keeps_its_children(policy: Any, keep: bool) -> None:
    real, deferred = nn.Linear(6, 6, device=device()), Counted(6, 3, device="meta")
    inner, norm = Parent(real), nn.BatchNorm1d(3, device="meta")
    model = Parent(inner, deferred, norm)
    model.register_parameter("scale", nn.Parameter(torch.empty(6, device="meta")))
    weight = real.weight.detach().clone()
    wrapper = FSDP(model, auto_wrap_policy=policy, use_orig_params=keep)
    assert [module.num_resets for module in (model, inner, deferred)] == [1, 0, 1], "each owner of a tensor once"
    assert {tensor.device for tensor in (*wrapper.parameters(), *wrapper.buffers())} == {device()}
    assert sum(parameter.numel() for parameter in wrapper.parameters()) < 42 + 21 + 6 + 6, "the module is sharded"
    state = wrapper.state_dict()
    assert torch.equal(state["0.0.weight"], weight)
    for name, value in {"scale": 1.0, "1.weight": 0.5, "1.bias": 0.25, "2.running_var": 1.0}.items():
        assert torch.equal(state[name], torch.full_like(state[name], value))


@pytest.mark.spec("META-01")
@ranks(2)
def test_buffer_on_the_meta_device_is_materialized_if_all_parameters_are_real() -> None:
    real = Counted(3, 3, device=device())
    model = FSDP(nn.Sequential(real, nn.BatchNorm1d(3, affine=False, device="meta")))
    assert model[1].running_var.tolist() == [1.0] * 3
    assert real.num_resets == 0, "parameters with values are not changed"


@pytest.mark.spec("META-01", "META-02")
@pytest.mark.cpu
@ranks(2)
def test_default_initialization_gives_the_random_values_of_torch() -> None:
    def layers() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Embedding(5, 2)))
        return nn.Sequential(inner, nn.Linear(3, 4))

    states = []
    for wrapper in (FSDP, torch_fsdp.FullyShardedDataParallel):
        torch.manual_seed(5)
        states.append(wrapper(on_meta(layers), device_id=torch.device("cpu")).state_dict())
    assert_close(*states, rtol=0, atol=0)


@pytest.mark.spec("META-05")
@pytest.mark.parametrize("is_buffer", [False, True])
@ranks(2)
def test_class_without_reset_parameters_is_named(is_buffer: bool) -> None:
    speechless = type("Speechless", (nn.Module,), {})()
    if is_buffer:
        speechless.register_buffer("scale", torch.ones(3, device="meta"))
    else:
        speechless.weight = nn.Parameter(torch.ones(3, device="meta"))
    with refused(RuntimeError, "Speechless", "'1'", "reset_parameters", "param_init_fn"):
        FSDP(nn.Sequential(nn.Linear(2, 2), speechless), sync_module_states=True)


# --- param_init_fn ---


@pytest.mark.spec("META-06")
@pytest.mark.parametrize("has_init", [False, True])
@ranks(2)
def test_wrapped_and_ignored_modules_and_those_with_values_are_not_initialized(has_init: bool) -> None:
    in_unit, ignored, deferred = (Counted(3, 3, device="meta") for _ in range(3))
    real, calls = Counted(3, 3, device=device()), []

    def init(module: nn.Module) -> None:
        calls.append(module)
        module.to_empty(device=device(), recurse=False)

    model = nn.Sequential(FSDP(in_unit), ignored, deferred, real)
    wrapper = FSDP(model, ignored_modules=[ignored], param_init_fn=init if has_init else None)
    assert calls == ([model, deferred] if has_init else [])
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
    if isinstance(module, Parent):
        module.to_empty(device=device())
        module.apply(fill)


def memory_by_the_outermost(module: nn.Module) -> None:
    if any(tensor.is_meta for tensor in module.parameters()):
        module.to_empty(device=device())
    fill(module)


@pytest.mark.spec("META-03", "META-04", "META-06")
@pytest.mark.parametrize("init", [each_module, the_container, memory_by_the_outermost])
@pytest.mark.parametrize("classes", [set(), {Parent}], ids=["one unit", "a unit for each block"])
@pytest.mark.cpu
@ranks(2)
def test_an_initializer_is_called_for_the_modules_and_gives_the_values_of_torch(
    init: Callable[[nn.Module], None], classes: set[type[nn.Module]]
) -> None:
    found = []
    for wrapper in (FSDP, torch_fsdp.FullyShardedDataParallel):
        blocks = [on_meta(lambda: Parent(nn.Linear(3, 3), nn.BatchNorm1d(3))) for _ in range(2)]
        model = nn.Sequential(blocks[0], nn.Sequential(blocks[1], nn.ReLU()))
        paths = {module: path for path, module in model.named_modules()}
        recorded = mock.Mock(side_effect=init)
        policy = torch_fsdp.wrap.ModuleWrapPolicy(classes)
        torch.manual_seed(3)
        model = wrapper(model, param_init_fn=recorded, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        found.append(([paths[call.args[0]] for call in recorded.mock_calls], model.state_dict()))
    (ours, state), (theirs, expected) = found
    assert ours == theirs
    for name in [name for name in expected if name.endswith(("weight", "bias"))]:
        assert torch.equal(state[name], expected[name])


@pytest.mark.spec("META-01", "META-03", "META-05")
@ranks(2)
def test_an_init_that_leaves_something_on_the_meta_device_is_refused() -> None:
    def fill_parameters_only(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(parameter.shape, device=device())))

    with refused(RuntimeError, "Linear", "weight", "param_init_fn", "to_empty"):
        FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=lambda module: None, sync_module_states=True)
    with refused(RuntimeError, "'running_mean'", "module '1' (BatchNorm1d)"):
        FSDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta")), param_init_fn=fill_parameters_only)


@pytest.mark.spec("META-07", "META-08")
@ranks(2)
def test_without_meta_tensors_param_init_fn_is_never_called_and_it_must_be_callable() -> None:
    FSDP(nn.BatchNorm1d(2), param_init_fn=pytest.fail, device_id=device())
    for given in ("init", True, torch.ones(1)):
        with refused(ValueError, "param_init_fn", "callable", repr(given)):
            FSDP(nn.Linear(3, 3, device="meta"), param_init_fn=given, sync_module_states=True)


# --- several units, several ranks ---


@pytest.mark.spec("META-10", "SYNC-03")
@ranks(2)
def test_policy_units_are_materialized_sent_and_sharded_one_after_the_other() -> None:
    model = on_meta(modules.Stack)
    paths = {module: path for path, module in model.named_modules()}
    calls: list[tuple[str, int, int, int]] = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            num_real = sum(not p.is_meta and p.dim() == 2 for p in model.parameters())
            calls.append((paths[module], len(FSDP.fsdp_modules(model)), recorder.count("BCAST"), num_real))
            module.to_empty(device=device(), recurse=False)

    with trace.record() as recorder:
        wrapped(model, param_init_fn=init, sync_module_states=True)
    # Each entry has the path, the number of units already sharded, the number of broadcasts, and the number of
    # unsharded weights in memory.
    blocks = [(f"blocks.{index}.linear", index, index, 0) for index in range(4)]
    assert calls == [*blocks, ("enter", 4, 4, 0), ("leave", 4, 4, 1)]
    assert recorder.order("BCAST") == [*["BCAST Block"] * 4, "BCAST Stack"]


@pytest.mark.spec("META-11")
@pytest.mark.parametrize("options", [{}, {"param_init_fn": each_module}], ids=["default", "own function"])
@ranks(2)
def test_random_values_differ_between_ranks_unless_they_are_sent(options: dict[str, Any]) -> None:
    def initial_values(rank: int, **sync: bool) -> Tensor:
        torch.manual_seed(100 + rank)
        return FSDP(nn.Linear(6, 6, device="meta"), device_id=device(), **options, **sync)._flat_param.detach()

    as_rank_0 = initial_values(0)
    assert torch.equal(initial_values(dist.get_rank()), as_rank_0) is (dist.get_rank() == 0)
    assert torch.equal(initial_values(dist.get_rank(), sync_module_states=True), as_rank_0)


# --- torchdistX ---


@pytest.mark.spec("META-09")
@pytest.mark.parametrize("has_init", [False, True])
@as_units
@ranks(2)
def test_a_deferred_model_is_initialized_by_param_init_fn_or_torchdistx(policy: Any, has_init: bool) -> None:
    def init(module: nn.Module) -> None:
        calls.append(module)
        materialize_module(module)

    def materialize_module(module: nn.Module) -> None:
        """Like torchdistX's: gives memory and values to a module and everything inside it."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                owner._parameters[name] = nn.Parameter(torch.full_like(parameter, 3.0))

    plain = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).to(device())
    for tensor in plain.parameters():
        tensor.is_fake = True  # It has no values, although it is not on the meta device.
    layers, calls = list(plain), list[nn.Module]()
    fake, deferred_init = types.ModuleType("torchdistx.fake"), types.ModuleType("torchdistx.deferred_init")
    fake.is_fake = lambda tensor: getattr(tensor, "is_fake", False)  # type: ignore[attr-defined]
    deferred_init.materialize_module = materialize_module  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (types.ModuleType("torchdistx"), fake, deferred_init)}
    with mock.patch.dict(sys.modules, modules):
        model = FSDP(plain, auto_wrap_policy=policy, param_init_fn=init if has_init else None)
    assert calls == ([] if not has_init else [plain, *layers] if policy is None else layers)
    assert {float(value.unique()) for value in model.state_dict().values()} == {3.0}


# --- shared and ignored parameters ---


def remembering() -> Callable[[nn.Module], None]:
    """Gives memory to each parameter once, and registers the same one again in the next module."""
    given: dict[nn.Parameter, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                given.setdefault(parameter, nn.Parameter(torch.ones_like(parameter, device=device())))
                setattr(module, name, given[parameter])

    return fill


@pytest.mark.spec("PROG-66")
@pytest.mark.parametrize("has_units", [False, True])
@flat_or_original
@pytest.mark.parametrize("start", ["real on rank 0", "reset", "remembering"])
@ranks(2)
def test_a_shared_parameter_on_the_meta_device_is_still_shared(start: str, keep: bool, has_units: bool) -> None:
    is_real = start == "real on rank 0" and dist.get_rank() == 0
    fill = remembering() if start == "remembering" else None
    if start == "real on rank 0" and not is_real:
        fill = lambda module: module.to_empty(device=device(), recurse=False)  # noqa: E731
    model: Any = modules.seeded(LanguageModel) if is_real else on_meta(LanguageModel)
    options: Any = {"param_init_fn": fill, "use_orig_params": keep, "sync_module_states": True, "device_id": device()}
    if has_units:
        model.block = FSDP(model.block, **options)
    model, plain = FSDP(model, **options), modules.seeded(LanguageModel)
    state = model.state_dict()
    if start == "real on rank 0":
        assert_close(state, plain.state_dict(), rtol=0, atol=0)
    assert torch.equal(state["embedding.weight"], state["head.weight"])
    plain.load_state_dict(state)
    for each in (model, plain):
        each(torch.arange(6, device=device()).view(2, 3)).backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.spec("PROG-66")
@flat_or_original
@ranks(2)
def test_a_shared_parameter_on_the_meta_device_in_two_units_is_refused(keep: bool) -> None:
    model = on_meta(LanguageModel)
    model.embedding = FSDP(model.embedding, use_orig_params=keep, device_id=device())
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: .*weight"):
        FSDP(model, use_orig_params=keep, device_id=device())


@pytest.mark.spec("PROG-67")
@pytest.mark.parametrize("start", ["reset", "remembering"])
@flat_or_original
@ranks(2)
def test_an_ignored_parameter_on_the_meta_device_stays_ignored(keep: bool, start: str) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    fill = remembering() if start == "remembering" else None
    options: Any = {"ignored_states": [model[0].bias], "param_init_fn": fill, "use_orig_params": keep}
    wrapper: Any = FSDP(model, device_id=device(), **options)
    assert any(wrapper.module[0].bias is parameter for parameter in wrapper.parameters())
    assert wrapper._unit.layout.sharding.padded_numel == 15 + 10 + 2 + 1
    wrapper(torch.ones(2, 3, device=device())).sum().backward()
    assert wrapper.module[0].bias.grad.shape == (5,)
