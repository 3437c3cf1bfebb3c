"""Functions that a sharded module inherits from torch's class, and functions that minifsdp does not offer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
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
        assert defined_in(type(model), name) == "minifsdp", f"{name} is inherited from torch"
        if not hasattr(minifsdp.FSDPModule, name):
            with pytest.raises(NotImplementedError, match=name):
                getattr(model, name)()


@pytest.mark.spec("NEW-26")
@ranks(2)
def test_a_function_that_a_later_torch_adds_is_an_error_unless_the_users_class_has_it() -> None:
    class Later(torch_fsdp.FSDPModule):
        def set_something_new(self, enabled: bool) -> None:
            """Would only work with torch's state."""

    class Layer(nn.Linear):
        pass

    class OwnLayer(nn.Linear):
        def set_something_new(self, enabled: bool) -> str:
            return f"the user's, {enabled}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fsdp, "FSDPModule", Later)
        models: Any = [minifsdp.fully_shard(layer(4, 4).to(device())) for layer in (Layer, OwnLayer)]
    with pytest.raises(NotImplementedError, match="set_something_new"):
        models[0].set_something_new(True)
    assert models[1].set_something_new(True) == "the user's, True"


@pytest.mark.spec("NEW-26")
def test_every_public_function_of_torch_s_wrapper_is_one_of_ours() -> None:
    names = [name for name in functions_of(torch_fsdp.FullyShardedDataParallel) if not name.startswith("_")]
    assert {"clip_grad_norm_", "no_sync", "optim_state_dict", "module"} <= {*names}
    for name in names:
        assert defined_in(minifsdp.FullyShardedDataParallel, name) == "minifsdp", name


# --- functions and options of torch that minifsdp does not offer ---


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_defaults_of_these_options_are_accepted() -> None:
    for policy in (minifsdp.MixedPrecisionPolicy(param_dtype_override_fn=None), torch_fsdp.MixedPrecisionPolicy()):
        model: Any = minifsdp.fully_shard(seeded(), mp_policy=policy)
        model.set_keep_unsharded_storage(False)
        model.set_allocate_memory_from_process_group_for_comm(False)
        loss_of(model(batch())).backward()
