"""What is trained: three models, each of which asks something else of an FSDP.

==========  ===================================  =======================================================
name        model                                where its time goes
==========  ===================================  =======================================================
``tiny``    48 x ``Linear(32, 32)``              the library: a unit computes for 20 microseconds
``gpt``     the tutorial's GPT, 14 M parameters  all of it, as in life: compute, sending, optimizer
``wide``    4 x ``Linear(2048, 2048)``           the wire: 16 MiB a unit, next to no compute
==========  ===================================  =======================================================

A step is what a training loop does: clear gradients, forward and backward for each micro-batch, one AdamW step. The
batches are drawn from the number of the step, of the micro-batch and of the rank, so all contenders see the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutorials.gpt.model import GPT, VOCABULARY, Block

__all__ = ["WORKLOADS", "Batch", "Workload"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how to shard it.

    Attributes:
        name: as the table shows it.
        about: one line for the head of the table.
        build: makes the plain model; the same weights each time it is called after the same seed.
        unit_class: whose instances become units, beside the root.
        draw: one batch.
        loss: of one batch.
        strategy: by the name that FSDP1 has for it.
        bf16: parameters are gathered and gradients reduced in bfloat16; plain models run under autocast.
        accumulate: micro-batches in each step, all but the last without synchronisation.
        rounds: how many, unless the run is a quick one.
        tolerance: how far losses may lie apart, relative.
        num_ranks: how many train it.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    unit_class: type[nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    strategy: str = "FULL_SHARD"
    bf16: bool = False
    accumulate: int = 1
    rounds: int = 12
    tolerance: float = 1e-6
    num_ranks: int = 2

    def model(self) -> nn.Module:
        """The plain model, with the same weights every time."""
        torch.manual_seed(0)
        return self.build()

    @property
    def is_hybrid(self) -> bool:
        """Whether replicas of two ranks shard."""
        return self.strategy == "HYBRID_SHARD"

    @property
    def num_units(self) -> int:
        """Units with parameters, without the root."""
        return sum(isinstance(module, self.unit_class) for module in self.model().modules())

    @property
    def largest_unit(self) -> int:
        """Bytes of the parameters of the largest unit, in float32."""
        units = [module for module in self.model().modules() if isinstance(module, self.unit_class)]
        return max(sum(4 * parameter.numel() for parameter in unit.parameters()) for unit in units)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """The micro-batches of one rank in one step."""
        seeds = [(step * self.accumulate + index) * 64 + rank for index in range(self.accumulate)]
        return [self.draw(torch.Generator().manual_seed(seed)) for seed in seeds]


def _rows(width: int, num_rows: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (
        torch.randn(num_rows, width, generator=generator),
        torch.randn(num_rows, width, generator=generator),
    )


def _text(generator: torch.Generator) -> Batch:
    text = torch.randint(VOCABULARY, (2, 65), generator=generator)
    return text[:, :-1], text[:, 1:]


def _surprise(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.float().flatten(0, 1), following.flatten())


def _stack(num_layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=width < 1000) for _ in range(num_layers)))


TINY = Workload("tiny", "48 x Linear(32, 32)", lambda: _stack(48, 32), nn.Linear, _rows(32, 8), F.mse_loss, rounds=40)
GPT_14M = Workload(
    "gpt", "GPT, 8 blocks of width 384, 14.3 M parameters", lambda: GPT(width=384, num_blocks=8, num_heads=6), Block,
    _text, _surprise,
)  # fmt: skip
WIDE = Workload("wide", "4 x Linear(2048, 2048)", lambda: _stack(4, 2048), nn.Linear, _rows(2048, 16), F.mse_loss)

WORKLOADS = {
    workload.name: workload
    for workload in (
        TINY,
        replace(TINY, name="tiny-grad-op", strategy="SHARD_GRAD_OP"),
        GPT_14M,
        replace(GPT_14M, name="gpt-grad-op", strategy="SHARD_GRAD_OP"),
        replace(GPT_14M, name="gpt-no-shard", strategy="NO_SHARD"),
        # Plain models compute under autocast, which rounds in other places.
        replace(GPT_14M, name="gpt-bf16", bf16=True, tolerance=5e-3),
        replace(GPT_14M, name="gpt-accumulate-4", accumulate=4, rounds=6),
        # Sums of four numbers depend on their order.
        replace(GPT_14M, name="gpt-hybrid", strategy="HYBRID_SHARD", num_ranks=4, rounds=6, tolerance=1e-5),
        WIDE,
        replace(WIDE, name="wide-grad-op", strategy="SHARD_GRAD_OP"),
    )
}
