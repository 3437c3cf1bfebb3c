"""The model of the programs, and its batches: small, odd sizes, so that most parameters are split with padding.

::

    Net   enter (3 -> 4)   in the root unit
          blocks.0 .. 2    each is a unit; the middle one can contain another unit, and each can run twice
          leave (4 -> 2)   in the root unit
          seen             a buffer: the number of forwards

A block computes one of these. All but the first let autograd give one gradient tensor to the parameter and to the
input, or give the parameter a gradient of another layout or dtype:

===========  ==================================================  =====================================================
kind         computes                                            parameters
===========  ==================================================  =====================================================
``mlp``      ``x + narrow(tanh(wide(x)))``                       three of unequal size
``add``      ``x + table``                                       one, of the shape of the input, split without padding
``view``     ``x + table.t()``                                   one, used through a view
``expand``   ``x + table`` by broadcasting                       one row
``complex``  ``x + real(x * factor) + imag(x * factor) / 2``     one, complex
``both``     the same, and ``+ shift``                           one real and one complex, in one unit
``dtypes``   ``x + (x @ low) * single + double``                 bfloat16, float32 and float64 in one unit
===========  ==================================================  =====================================================

Everything else is float64: rounding is much smaller than any mistake, in any order of the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "DTYPES",
    "KINDS",
    "NUM_BLOCKS",
    "WIDTH",
    "Block",
    "Kept",
    "Net",
    "batch",
    "loss_of",
    "made",
    "optimizer_over",
    "output_of",
]

NUM_BLOCKS, WIDTH, SAMPLES = 3, 4, 3
KINDS = ("mlp", "add", "view", "expand", "complex", "both", "dtypes")
DTYPES = {"double": torch.float64, "float": torch.float32}
SHAPES = {"add": (SAMPLES, WIDTH), "view": (WIDTH, SAMPLES), "expand": (1, WIDTH)}


class Kept:
    """The gradients of one forward that hooks of the user keep: of the input and of what blocks pass on.

    A hook keeps the tensor itself, not a copy. So a later write into its memory is a difference.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.input: Tensor

    def watch(self, name: str, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(lambda gradient: self.gradients.__setitem__(name, gradient))


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None, kind: str = "mlp") -> None:
        super().__init__()
        self.kind, self.inner = kind, inner
        if kind == "mlp":
            self.wide = nn.Linear(WIDTH, 5)
            self.narrow = nn.Linear(5, WIDTH, bias=False)
        elif kind in ("complex", "both"):
            if kind == "both":
                self.shift = nn.Parameter(torch.randn(WIDTH) / 4)
            self.factor = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128) / 4)
        elif kind == "dtypes":
            self.low = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).bfloat16())
            self.single = nn.Parameter(torch.rand(WIDTH))
            self.double_ = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        else:
            self.table = nn.Parameter(torch.randn(SHAPES[kind]) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        if self.kind == "mlp":
            return x + self.narrow(torch.tanh(self.wide(x)))
        if self.kind in ("complex", "both"):
            product = x * self.factor
            # Mixed precision does not cast a complex parameter, so the product can have another dtype than the input.
            parts = (product.real + product.imag / 2).to(x.dtype)
            return x + parts + (self.shift if self.kind == "both" else 0)
        if self.kind == "dtypes":
            return x + (x.to(self.low.dtype) @ self.low).to(x.dtype) * self.single + self.double_
        return x + (self.table.t() if self.kind == "view" else self.table)


class Net(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.uses = options.get("uses", 1)
        kinds = options.get("kinds") or ["mlp"] * NUM_BLOCKS
        self.enter = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(
            [
                Block(Block() if options.get("nested") and number == 1 else None, kind)
                for number, kind in enumerate(kinds)
            ]
        )
        self.leave = nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, skip: int | None = None, bang: int | None = None, kept: Kept | None = None) -> Tensor:
        self.seen += 1
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number == bang:
                raise ValueError("bang")
            if number != skip:
                for use in range(self.uses):
                    if kept is not None:
                        kept.watch(f"input of block {number}, use {use}", x)
                    x = block(x)
        if kept is not None:
            kept.watch("output of the blocks", x)
        return self.leave(x)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Calls the model in a loop, like a language model does."""
        return self(x + self(x).sum() / 8)


def made(options: dict[str, Any]) -> Net:
    """Creates the model, with the same values on every rank."""
    torch.manual_seed(17)
    net = Net(options)
    for module in net.modules():
        if not (isinstance(module, Block) and module.kind == "dtypes"):
            for part in (*module._parameters.values(), *module._buffers.values()):
                if part is not None and not part.is_complex():
                    part.data = part.data.to(DTYPES[options.get("begins", "double")])
    return net


def batch(number: int, rank: int, width: int = 3) -> Tensor:
    """The input number ``number`` of a rank."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * rank + width)
    return torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64)


def output_of(whole: nn.Module, called: nn.Module, call: dict[str, Any], rank: int, kept: Kept | None) -> Tensor:
    """The output of the whole model or of one block on a rank. `kept` records gradients in the backward."""
    is_part = called is not whole
    x = batch(call["batch"], rank, WIDTH if is_part else 3).to(DTYPES[call.get("dtype", "double")])
    if kept is not None:
        kept.input = x.requires_grad_()
        kept.watch("input", x)
    if is_part:
        return called(x)
    # A list contains the block that each rank leaves out.
    skip = call.get("skip")
    skip = skip[rank] if isinstance(skip, list) else skip
    return whole(x, skip=skip, bang=call.get("bang"), kept=kept)


def loss_of(output: Tensor) -> Tensor:
    return torch.tanh(output).square().mean()


def optimizer_over(parameters: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    # On a GPU, PyTorch takes `foreach=True` by default.
    kind = options.get("steps_by")
    how: dict[str, Any] = {kind: True} if kind else {}
    if options.get("optimizer") == "adam":
        # Adam divides by the size of a gradient, and a tiny gradient is mostly rounding error.
        return torch.optim.Adam(parameters, lr=1 / 32, eps=1 / 8, **how)
    # The fused SGD of torch raises TypeError if some parameters have a momentum and others have none yet.
    return torch.optim.SGD(parameters, lr=1 / 8, momentum=0.0 if kind == "fused" else 0.5, **how)
