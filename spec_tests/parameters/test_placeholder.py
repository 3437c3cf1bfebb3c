"""A placeholder parameter: a tensor with a shape but without values, and the errors of operations that need values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.engine.placeholder import PlaceholderParameter
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy

CPU = torch.device("cpu")


def placeholder(dtype: torch.dtype = torch.float32) -> PlaceholderParameter:
    flat_param = nn.Parameter(torch.zeros(6), requires_grad=False)
    return PlaceholderParameter(torch.empty(2, 3, dtype=dtype), "layer.weight", flat_param)


@pytest.mark.pure
@pytest.mark.spec("ORIG-11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placeholder_has_shape_dtype_and_device(dtype: torch.dtype) -> None:
    tensor = placeholder(dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == (torch.Size([2, 3]), dtype, CPU)
    assert (tensor.numel(), tensor.dim(), tensor.ndim, len(tensor), tensor.size(1)) == (6, 2, 2, 2, 3)
    assert tensor.is_floating_point()
    assert tensor.requires_grad is False
    assert tensor.data_ptr() == 0, "it has no memory"


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "addition": lambda t: t + 1,
    "addition from the right": lambda t: torch.ones(2, 3) + t,
    "change in place": lambda t: t.add_(1),
    "filling": lambda t: t.zero_(),
    "initialisation": nn.init.normal_,
    "matrix product": lambda t: torch.ones(1, 3) @ t.T,
    "linear layer": lambda t: nn.functional.linear(torch.ones(1, 3), t),
    "element": lambda t: t[0],
    "item": lambda t: t.sum().item(),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(6),
    "transpose": lambda t: t.t(),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "cast": lambda t: t.to(torch.float64),
    "copy into another": lambda t: torch.empty(2, 3).copy_(t),
    "copy from another": lambda t: t.copy_(torch.ones(2, 3)),
    "comparison": lambda t: torch.equal(t, torch.ones(2, 3)),
    "as a member of a list": lambda t: torch.stack([torch.ones(2, 3), t]),
    "as a keyword": lambda t: torch.add(input=torch.ones(2, 3), other=t),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "iteration": list,
    "its data": lambda t: t.data,
    # Without their own methods, these exports would read memory that does not exist, and end the process.
    "dlpack": lambda t: t.__dlpack__(),
    "shared memory": lambda t: t.share_memory_(),
    "other data": lambda t: setattr(t, "data", torch.ones(2, 3)),
    "training it alone": lambda t: setattr(t, "requires_grad", True),
    "freezing it alone": lambda t: t.requires_grad_(False),
}


@pytest.mark.pure
@pytest.mark.spec("ORIG-11")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_operation_on_a_placeholder_raises_with_name_and_remedy(operation: str) -> None:
    message = (
        r"(?s)rank 0: parameter 'layer.weight' \(shape \(2, 3\)\) is sharded right now.*wrap that part as a unit"
        r".*summon_full_params\(\)"
    )
    with pytest.raises(RuntimeError, match=message):
        OPERATIONS[operation](placeholder())


@pytest.mark.pure
@pytest.mark.spec("NEW-22")
def test_a_deep_copy_raises_with_the_remedy() -> None:
    message = r"(?s)rank 0.*copy\.deepcopy.*'layer\.weight'.*before wrapping.*state_dict"
    with pytest.raises(RuntimeError, match=message):
        copy.deepcopy({"model": [placeholder()]})


# --- in a sharded model ---


@pytest.mark.spec("PROG-06", "FWD-03")
@ranks(2)
def test_a_module_may_read_before_the_all_gather_whether_a_parameter_is_trained() -> None:
    """Defect: ``requires_grad`` is ``False`` while the unit is sharded, so the caller does not train the unit."""
    layers = nn.Sequential(*(nn.Linear(4, 4, device=device()) for _ in range(2)))
    seen: list[bool] = []
    layers.register_forward_pre_hook(lambda *_: seen.extend(layer.weight.requires_grad for layer in layers))
    model = FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=False)
    for frozen, expected in ((False, [True, True]), (True, [False, True]), (False, [True, True])):
        layers[0].requires_grad_(not frozen)
        model(torch.ones(2, 4, device=device())).sum().backward()
        assert seen == expected
        seen.clear()
        assert [layer.weight.requires_grad for layer in layers] == expected
