"""``grad_dtype`` of a parameter: the dtype of its ``.grad``, in which it is accumulated and reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import minifsdp
from minifsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from spec_tests.harness import device, ranks
from spec_tests.models.values import full

BF16, F32 = torch.bfloat16, torch.float32
LIBRARIES: dict[str, Any] = {"minifsdp": minifsdp}
if hasattr(Tensor, "_has_grad_dtype_override"):
    LIBRARIES["torch"] = torch_fsdp

# In bfloat16, 1 + 1 / 256 is 1. So a sum in bfloat16 loses the second number.
SMALL = 1 / 256


def layer() -> nn.Linear:
    """A layer in bfloat16. The gradient of its weight is float32."""
    model = nn.Linear(2, 2, device=device(), dtype=BF16)
    model.weight.grad_dtype = F32
    return model


def gradient(parameter: Any) -> tuple[torch.dtype, float]:
    """The dtype of a gradient, and its value, which all of its elements have."""
    (value,) = full(parameter.grad).unique().tolist()
    return parameter.grad.dtype, value


def ones(factor: float) -> Tensor:
    return torch.full((1, 2), factor, device=device(), dtype=BF16)


def one_or_small() -> Tensor:
    """The gradient of the weight is 1 on rank 0 and 1 / 256 on rank 1."""
    return ones(1.0 if dist.get_rank() == 0 else SMALL)


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize(
    ("grad_dtype", "reduce_dtype", "mean"),
    [
        (F32, None, (1 + SMALL) / 2),
        (F32, BF16, 0.5),
        (F32, F32, (1 + SMALL) / 2),
        (None, F32, (1 + SMALL) / 2),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_without_a_reduce_dtype_the_reduction_uses_it(
    library: str, is_late: bool, grad_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, mean: float
) -> None:
    """The choice may follow the sharding. The gradient of a parameter whose choice is None has the reduced dtype."""
    fsdp = LIBRARIES[library]
    model: Any = nn.Linear(2, 2, device=device(), dtype=BF16)
    if not is_late:
        model.weight.grad_dtype = grad_dtype
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    if is_late:
        model.weight.grad_dtype = grad_dtype

    model(one_or_small()).sum().backward()

    assert model.weight.grad.to_local().dtype is F32
    assert gradient(model.weight) == (F32, mean)
    # The bias has no choice, so its gradient has its dtype.
    assert gradient(model.bias) == (BF16, 1.0)


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_micro_batches_are_added_in_it(library: str, reduces: bool) -> None:
    """With and without a reduction after the first micro-batch."""
    model: Any = LIBRARIES[library].fully_shard(layer())

    model.set_requires_gradient_sync(reduces)
    model(ones(1.0)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(ones(SMALL)).sum().backward()

    assert gradient(model.weight) == (F32, 1 + SMALL)


@pytest.mark.spec("NEW-18")
@ranks(4)
def test_replicas_and_accumulation_without_all_reduce() -> None:
    mesh = dist.device_mesh.init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(layer(), mesh=mesh)

    model.set_requires_all_reduce(False)
    model(ones(1.0)).sum().backward()
    model.set_requires_all_reduce(True)
    model(ones(SMALL)).sum().backward()

    assert gradient(model.weight) == (F32, 1 + SMALL)


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_a_conversion_of_the_model_keeps_the_choice() -> None:
    """Also that of a gradient that exists already."""
    model: Any = fully_shard(layer().float())
    model.weight.grad_dtype = torch.float64
    model(ones(0.0).float()).sum().backward()

    model.bfloat16()
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (torch.float64, BF16)
    state_dict = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state_dict, assign=True)
    model(one_or_small()).sum().backward()

    assert gradient(model.weight) == (torch.float64, (1 + SMALL) / 2)
    assert model.bias.grad.dtype is BF16


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_a_conversion_between_micro_batches_keeps_the_digits() -> None:
    """The gradient that is not reduced yet stays in float32."""
    model: Any = fully_shard(layer())
    model.set_requires_gradient_sync(False)
    model(ones(1.0)).sum().backward()
    model(ones(SMALL)).sum().backward()

    model.half()
    model.set_requires_gradient_sync(True)
    model(ones(0.0).half()).sum().backward()

    assert gradient(model.weight) == (F32, 1 + SMALL)


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize("pins", [False, True])
@ranks(2)
def test_offloaded_gradients_have_it(pins: bool) -> None:
    model: Any = fully_shard(layer().cpu(), offload_policy=CPUOffloadPolicy(pin_memory=pins and device().type != "cpu"))

    model(one_or_small()).sum().backward()

    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (F32, BF16)
    assert torch.equal(model.weight.grad.to_local(), torch.full((1, 2), (1 + SMALL) / 2))


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_a_parameter_without_elements_has_a_gradient_of_it() -> None:
    model: Any = nn.Linear(2, 2, device=device(), dtype=BF16)
    model.empty = nn.Parameter(torch.empty(0, 2, device=device(), dtype=BF16))
    model.empty.grad_dtype = F32
    fully_shard(model)

    (model(ones(1.0)).sum() + model.empty.sum()).backward()

    assert (model.empty.grad.dtype, model.bias.grad.dtype) == (F32, BF16)


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_a_step_and_clipping_use_the_digits_of_the_gradient() -> None:
    """SGD adds the gradient in float32 to a weight in bfloat16. A master copy would do the same."""
    model: Any = fully_shard(layer(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model(ones(1.0)).sum().backward()
    model(ones(SMALL)).sum().backward()

    norm: Any = nn.utils.clip_grad_norm_([model.weight], 1e9)

    assert norm.full_tensor().item() == pytest.approx(2 * (1 + SMALL))
    before = full(model.weight.detach()).float()
    torch.optim.SGD([model.weight], lr=1.0).step()
    assert torch.equal(full(model.weight.detach()), (before - (1 + SMALL)).bfloat16())


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_two_uses_in_one_backward_are_added_in_it() -> None:
    class UsedTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return self.layer(one) + self.layer(other)

    model: Any = fully_shard(UsedTwice())

    model(ones(1.0), ones(SMALL)).sum().backward()

    assert gradient(model.layer.weight) == (F32, 1 + SMALL)


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_a_conversion_that_fails_keeps_the_gradients() -> None:
    model: Any = fully_shard(layer())
    model(ones(1.0)).sum().backward()

    with pytest.raises(AttributeError, match="no_such_method"):
        model._apply(lambda tensor: tensor.no_such_method())

    assert model.weight.grad is not None
    assert model.weight.grad_dtype is F32
