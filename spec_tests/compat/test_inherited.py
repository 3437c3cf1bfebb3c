"""Functions that a sharded module inherits from torch's class, and functions that minifsdp does not offer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of


def functions_of(theirs: type) -> list[str]:
    """The names of all functions and properties of a class of torch, without those of ``nn.Module`` and ``object``."""
    own = [base for base in theirs.__mro__ if base.__module__.startswith("torch.distributed.fsdp")]
    names = {
        name for base in own for name, value in vars(base).items() if callable(value) or isinstance(value, property)
    }
    return sorted(name for name in names if not name.startswith("__"))


def defined_in(owner: type, name: str) -> str:
    """The package that defines the attribute ``name`` of a class, for example ``"minifsdp"``."""
    base = next(base for base in owner.__mro__ if name in vars(base))
    value = inspect.unwrap(getattr(vars(base)[name], "__func__", vars(base)[name]))
    return str(getattr(value, "__module__", None) or base.__module__).split(".")[0]


@pytest.mark.spec("NEW-26")
@ranks(2)
def test_every_function_of_torch_s_module_is_one_of_ours_or_an_error_that_names_it() -> None:
    model: Any = minifsdp.fully_shard(nn.Linear(4, 4).to(device()))
    assert isinstance(model, torch_fsdp.FSDPModule)
    names = functions_of(torch_fsdp.FSDPModule)
    assert {"unshard", "set_requires_gradient_sync", "_set_unshard_async_op"} <= {*names}
    for name in names:
        if hasattr(minifsdp.FSDPModule, name):
            assert defined_in(minifsdp.FSDPModule, name) == "minifsdp", name
            continue
        with pytest.raises(NotImplementedError, match=name):
            getattr(model, name)()
    for name in names:
        assert defined_in(type(model), name) == "minifsdp", f"{name} is inherited from torch"


@pytest.mark.spec("NEW-26")
@ranks(2)
def test_a_function_that_a_later_torch_adds_is_an_error_that_names_it() -> None:
    class Later(torch_fsdp.FSDPModule):
        def set_something_new(self, enabled: bool) -> None:
            """Would only work with torch's state."""

    class Layer(nn.Linear):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fsdp, "FSDPModule", Later)
        model: Any = minifsdp.fully_shard(Layer(4, 4).to(device()))
    with pytest.raises(NotImplementedError, match="set_something_new"):
        model.set_something_new(True)
    assert isinstance(model, Later)


@pytest.mark.spec("NEW-26")
@ranks(2)
def test_a_function_of_the_user_s_class_is_kept_although_torch_has_one_of_that_name() -> None:
    class Later(torch_fsdp.FSDPModule):
        def set_something_new(self, enabled: bool) -> None:
            """Would only work with torch's state."""

    class Layer(nn.Linear):
        def set_something_new(self, enabled: bool) -> str:
            return f"the user's, {enabled}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fsdp, "FSDPModule", Later)
        model: Any = minifsdp.fully_shard(Layer(4, 4).to(device()))
    assert model.set_something_new(True) == "the user's, True"


@pytest.mark.pure
@pytest.mark.spec("NEW-26")
def test_every_public_function_of_torch_s_wrapper_is_one_of_ours() -> None:
    names = [name for name in functions_of(torch_fsdp.FullyShardedDataParallel) if not name.startswith("_")]
    assert {"clip_grad_norm_", "no_sync", "optim_state_dict", "module"} <= {*names}
    for name in names:
        assert defined_in(minifsdp.FullyShardedDataParallel, name) == "minifsdp", name


# --- functions and options of torch that minifsdp does not offer ---


def override_by(library: Any, dtype: torch.dtype | None) -> Any:
    """A policy that keeps some parameters in another dtype. In torch since 2.15."""
    return library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda parameter: dtype)


def with_grad_dtype(dtype: torch.dtype | None, *, is_sharded: bool) -> None:
    """A parameter whose gradient has another dtype. ``fully_shard`` of torch follows it since 2.15."""
    layer = nn.Linear(4, 4).to(device())
    model: Any = minifsdp.fully_shard(layer) if is_sharded else layer
    model.weight.grad_dtype = dtype
    model = model if is_sharded else minifsdp.fully_shard(layer)
    model(torch.ones(1, 4, device=device()))


NOT_OFFERED: dict[str, tuple[str, Callable[[], Any]]] = {
    "policy": (
        "param_dtype_override_fn",
        lambda: minifsdp.fully_shard(seeded(), mp_policy=override_by(minifsdp, None)),
    ),
    "policy of one dtype": (
        "param_dtype_override_fn",
        lambda: minifsdp.fully_shard(seeded(), mp_policy=override_by(minifsdp, torch.float32)),
    ),
    "kept storage": (
        "set_keep_unsharded_storage",
        lambda: minifsdp.fully_shard(seeded()).set_keep_unsharded_storage(True),
    ),
    "kept storage of one unit": (
        "set_keep_unsharded_storage",
        lambda: minifsdp.fully_shard(seeded()).set_keep_unsharded_storage(keep=True, recurse=False),
    ),
    "bfloat16 gradient": (
        "'weight'.* grad_dtype=torch.bfloat16",
        lambda: with_grad_dtype(torch.bfloat16, is_sharded=False),
    ),
    "any gradient": ("'weight'.* grad_dtype=None", lambda: with_grad_dtype(None, is_sharded=False)),
    "bfloat16 gradient of a shard": (
        "grad_dtype=torch.bfloat16",
        lambda: with_grad_dtype(torch.bfloat16, is_sharded=True),
    ),
    "any gradient of a shard": ("grad_dtype=None", lambda: with_grad_dtype(None, is_sharded=True)),
}


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize("case", NOT_OFFERED)
@ranks(2)
def test_a_function_of_torch_that_is_not_offered_is_an_error_that_names_it(case: str) -> None:
    words, call = NOT_OFFERED[case]
    with pytest.raises(NotImplementedError, match=words):
        call()


@pytest.mark.needs("torch>=2.15")
@pytest.mark.spec("NEW-18")
@ranks(2)
def test_an_override_in_torch_s_own_policy_is_not_ignored() -> None:
    with pytest.raises(NotImplementedError, match="param_dtype_override_fn"):
        minifsdp.fully_shard(seeded(), mp_policy=override_by(torch_fsdp, torch.float32))


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_defaults_of_these_options_are_accepted() -> None:
    policies = [minifsdp.MixedPrecisionPolicy(param_dtype_override_fn=None), torch_fsdp.MixedPrecisionPolicy()]
    for policy in policies:
        model: Any = minifsdp.fully_shard(seeded(), mp_policy=policy)
        model.set_keep_unsharded_storage(False)
        model.set_allocate_memory_from_process_group_for_comm(False)
        loss_of(model(batch())).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
