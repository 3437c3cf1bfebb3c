"""Short optimizers for the page "Which optimizers may I use?", of kinds that torch does not have.

They show the values that such an optimizer needs, and are not for training: they have no options and are slow.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The elements that share one scale in `EightBitAdam`. Libraries use 256 or 2048.
BLOCK = 4
Closure = Callable[[], Tensor]


class _Written(torch.optim.Optimizer):
    """An optimizer that calls `update` for each parameter with a gradient."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Computes the loss, and updates all parameters."""
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                # A rank can have no element of a flat parameter. A DTensor has elements on all ranks, so that all ranks
                # take part in the collectives of its operators.
                if parameter.grad is not None and parameter.numel() > 0:
                    self.update(parameter, parameter.grad, self.state[parameter], group["lr"])
        return loss

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        """Updates one parameter."""
        raise NotImplementedError


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Lion(_Written):
    """Steps in the direction of the sign of an average. Each element is computed from that element alone."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        """Updates one parameter."""
        average = state.setdefault("average", torch.zeros_like(parameter))
        parameter.sub_((0.9 * average + 0.1 * gradient).sign(), alpha=lr)
        average.mul_(0.99).add_(gradient, alpha=0.01)


class EightBitAdam(_Written):
    """Adam with averages of 8 bits. Blocks of `BLOCK` consecutive elements of the local tensor share a scale."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        """Updates one parameter."""
        values, slope = local(parameter), local(gradient)
        first, second = (_stored(state.get(name), values) for name in ("first", "second"))
        first = 0.9 * first + 0.1 * slope
        second = 0.99 * second + 0.01 * slope**2
        state["step"] = state.get("step", 0) + 1
        unbiased = (second / (1 - 0.99 ** state["step"])).sqrt()
        values.sub_(first / (1 - 0.9 ** state["step"]) / (unbiased + 1e-3), alpha=lr)
        state["first"], state["second"] = quantized(first), quantized(second)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of 8 bits in rows of `BLOCK`, and the scale of each row."""
    flat = values.reshape(-1)
    rows = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (rows / scales).round().to(torch.int8), scales


def _stored(state: tuple[Tensor, Tensor] | None, values: Tensor) -> Tensor:
    if state is None:
        return torch.zeros_like(values)
    integers, scales = state
    return (integers * scales).view(-1)[: values.numel()].view(values.shape)


class Shampoo(_Written):
    """Multiplies the gradient with matrices that are made from the gradients of all rows and all columns."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        """Updates one parameter. A parameter that is not a matrix counts as a column."""
        matrix = gradient if gradient.ndim == 2 else gradient.reshape(-1, 1)
        left, right = matrix @ matrix.mT, matrix.mT @ matrix
        state["left"] = state.get("left", 0) + left
        state["right"] = state.get("right", 0) + right
        update = _root(state["left"]) @ matrix @ _root(state["right"])
        parameter.sub_(update.reshape(gradient.shape), alpha=lr)


def _root(matrix: Tensor) -> Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    roots: Tensor = (vectors * (values.clamp(min=0) + 1e-2) ** -0.25) @ vectors.mT
    return roots


class SAM(torch.optim.Optimizer):
    """SGD with the gradient at a point uphill. The norm of the gradient over all parameters gives the distance."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, distance: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "distance": distance})

    def norm(self) -> Tensor:
        """The norm of all gradients that this optimizer holds."""
        held = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        norms = torch.stack([gradient.norm() for gradient in held if gradient is not None])
        total: Tensor = norms.norm()
        return total

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Computes the gradient, moves uphill, computes it again, moves back, and updates."""
        with torch.enable_grad():
            loss = closure()
        norm = self.norm()
        moves = [
            (parameter, parameter.grad * (group["distance"] / norm))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, move in moves:
            parameter.add_(move)
        with torch.enable_grad():
            closure()
        for parameter, move in moves:
            parameter.sub_(move)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss


class ShardedSAM(SAM):
    """SAM for parameters that are shards: each element is on one rank only."""

    def norm(self) -> Tensor:
        """The norm of the gradients of all ranks. All ranks must call it."""
        held = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        total = torch.stack([local(gradient).square().sum() for gradient in held if gradient is not None]).sum()
        dist.all_reduce(total)
        return total.sqrt()
