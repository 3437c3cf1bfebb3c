"""A placeholder parameter: a tensor with a shape but without values, and the errors of operations that need values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
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


@pytest.mark.spec("FWD-01")
@ranks(2)
def test_direct_call_of_root_part_raises_while_root_is_unsharded() -> None:
    layers = nn.Sequential(*(nn.Linear(3, 3, device=device()) for _ in range(2)))
    layers[0] = FullyShardedDataParallel(layers[0], use_orig_params=False)
    model, x = FullyShardedDataParallel(layers, use_orig_params=False), torch.ones(2, 3, device=device())
    model(x)
    with pytest.raises(RuntimeError, match=r"'1\.weight'.*is sharded right now"):
        model.module[1](x)


@pytest.mark.spec("PROG-06", "FWD-03")
@ranks(2)
def test_a_module_may_read_before_the_all_gather_whether_a_parameter_is_trained() -> None:
    """Defect: ``requires_grad`` is ``False`` while the unit is sharded, so the caller does not train the unit."""

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4, device=device()) for _ in range(2)))
            self.seen: list[bool] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                self.seen.append(layer.weight.requires_grad)
                x = layer(x)
            return x

    model = FullyShardedDataParallel(Caller(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=False)
    for frozen, expected in ((False, [True, True]), (True, [False, True]), (False, [True, True])):
        model.layers[0].requires_grad_(not frozen)
        model(torch.ones(2, 4, device=device())).sum().backward()
        assert model.seen == expected
        model.seen.clear()
        assert [layer.weight.requires_grad for layer in model.layers] == expected


@pytest.mark.spec("PROG-06", "FWD-03")
@ranks(2)
def test_encoder_in_evaluation_mode_with_gradients_gives_the_results_of_torch() -> None:
    """``TransformerEncoder`` reads ``requires_grad`` of its first layer to choose its algorithm."""
    padded = torch.tensor([[False, False, True], [False, True, True]], device=device())
    results = []
    for package in (minifsdp, torch_fsdp):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=2).to(device())
        policy = package.wrap.ModuleWrapPolicy({nn.TransformerEncoderLayer})
        model = package.FullyShardedDataParallel(encoder, auto_wrap_policy=policy, device_id=device()).eval()
        output = model(torch.linspace(-1, 1, 48, device=device()).view(2, 3, 8), src_key_padding_mask=padded)
        output[:, 0].square().sum().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
