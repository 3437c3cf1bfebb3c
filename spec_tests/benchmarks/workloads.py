"""What is trained: three models, each of which asks something else of an FSDP.

==========  ===================================  =======================================================
name        model                                where its time goes
==========  ===================================  =======================================================
``tiny``    48 x ``Linear(32, 32)``              the library: a unit computes for 20 microseconds
``gpt``     the tutorial's GPT, 14 M parameters  all of it, as in life: compute, sending, optimizer
``wide``    4 x ``Linear(2048, 2048)``           the wire: 16 MiB a unit, next to no compute
==========  ===================================  =======================================================

`gpt-hybrid` is trained by four ranks, two groups of two, which have but two cores; so its GPT is a smaller one.

A step is what a training loop does: clear gradients, forward and backward for each micro-batch, one AdamW step. The
batches are drawn from the number of the step, of the micro-batch and of the rank, so all contenders see the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_tests.oracles.compare import SAME_MATH
from tutorials.gpt.model import GPT, VOCABULARY, Block

__all__ = ["NODES", "WORKLOADS", "Batch", "Workload", "adamw"]

Batch = tuple[Tensor, Tensor]
NODES = 2  # that a hybrid workload plays


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
        num_ranks: of the race.
        prefetch: each unit is told which one comes next in forward, by the means that each FSDP has for it.
        backward_prefetch: FSDP1's default; if not, it is told to gather nothing ahead, and FSDP2 has no word for that.
        bf16: parameters are gathered and gradients reduced in bfloat16; plain models run under autocast.
        accumulate: micro-batches in each step, all but the last without synchronisation.
        rounds: how many, unless the run is a quick one.
        tolerance: how far losses may lie apart, relative.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    unit_class: type[nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    strategy: str = "FULL_SHARD"
    num_ranks: int = 2
    prefetch: bool = False
    backward_prefetch: bool = True
    bf16: bool = False
    accumulate: int = 1
    rounds: int = 12
    tolerance: float = 1e-6

    def model(self) -> nn.Module:
        """The plain model, with the same weights every time."""
        torch.manual_seed(0)
        return self.build()

    @property
    def is_hybrid(self) -> bool:
        """Whether the ranks are `NODES` groups: sharded inside of each, replicated between them."""
        return self.strategy == "HYBRID_SHARD"

    def units_of(self, model: nn.Module) -> list[nn.Module]:
        """Units with parameters, in the order of forward, without the root."""
        return [module for module in model.modules() if isinstance(module, self.unit_class)]

    @property
    def num_units(self) -> int:
        """How many."""
        return len(self.units_of(self.model()))

    @property
    def largest_unit(self) -> int:
        """Elements of the largest one."""
        return max(sum(p.numel() for p in unit.parameters()) for unit in self.units_of(self.model()))

    def batches(self, step: int, rank: int) -> list[Batch]:
        """The micro-batches of one rank in one step."""
        seeds = [(step * self.accumulate + index) * 64 + rank for index in range(self.accumulate)]
        return [self.draw(torch.Generator().manual_seed(seed)) for seed in seeds]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What takes the step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


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
GPT_3M = Workload(
    "gpt-hybrid", "GPT, 4 blocks of width 256, 3.2 M parameters", lambda: GPT(width=256, num_blocks=4, num_heads=4),
    Block, _text, _surprise, strategy="HYBRID_SHARD", num_ranks=4, tolerance=SAME_MATH.rtol,
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
        replace(GPT_14M, name="gpt-accumulate-4-grad-op", strategy="SHARD_GRAD_OP", accumulate=4, rounds=6),
        replace(GPT_14M, name="gpt-prefetch", prefetch=True),
        GPT_3M,
        WIDE,
        replace(WIDE, name="wide-grad-op", strategy="SHARD_GRAD_OP"),
        # It is there for its memory.
        replace(WIDE, name="wide-no-prefetch", backward_prefetch=False, rounds=6),
    )
}
