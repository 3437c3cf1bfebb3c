"""A layer that records the dtypes that it computes with, and the gradients that are expected in mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spec_tests.harness import device
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of


class Probe(nn.Module):
    """Records the dtypes of its inputs, weight and buffer in ``seen``, and computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.5))
        self.bias = nn.Parameter(torch.zeros(6))
        self.register_buffer("scale", torch.full((6,), 1.0 + 2.0**-10))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = {
            "x": x.dtype,
            "weight": self.weight.dtype,
            "scale": self.scale.dtype,
            "args": [arg.dtype for arg in tree_leaves(args) if isinstance(arg, Tensor)],
            "kwargs": [arg.dtype for arg in tree_leaves(kwargs) if isinstance(arg, Tensor)],
        }
        product = x.to(self.weight.dtype) * self.weight
        if product.requires_grad:
            # Do not use the output: this unit's backward has only just begun when the output's gradient arrives.
            product.register_hook(self.in_backward)
        return product + self.bias

    def in_backward(self, gradient: Tensor) -> None:
        self.seen["gradient"] = gradient.dtype
        self.seen["weight in backward"] = self.weight.dtype


def probes(num: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Probe() for _ in range(num))).to(device())


def ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or (2, 6)), device=device())


def nested_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a `Probe`: floating-point tensors at every depth, mixed with other objects."""
    args = (ones(), [ones(2).double(), {"deep": (ones(3), "text", None)}])
    return args, {"keyword": ones(4), "nested": {"list": [ones(5).half()]}, "number": 1.5}


def expected_gradients(
    compute: torch.dtype = torch.float32,
    reduce: torch.dtype = torch.float32,
    steps: tuple[int, ...] = (0,),
    num_ranks: int = 2,
    plain: nn.Module | None = None,
) -> dict[str, Tensor]:
    """The mean over the ranks of the gradients that each rank accumulates in ``steps``, converted to float32."""
    of_ranks = []
    for rank in range(num_ranks):
        model = seeded()
        if plain is not None:
            model.load_state_dict(plain.state_dict())
        model.to(compute)
        for step in steps:
            loss_of(model(batch(step, rank).to(compute))).backward()
        of_ranks.append({name: parameter.grad.to(reduce) for name, parameter in model.named_parameters()})
    total = {name: sum((each[name] for each in of_ranks[1:]), of_ranks[0][name]) for name in of_ranks[0]}
    return {name: (gradient / num_ranks).float() for name, gradient in total.items()}
