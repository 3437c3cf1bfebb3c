"""The workloads: three models that stress different parts of an FSDP.

==========  ===================================  =======================================================
name        model                                most of its time
==========  ===================================  =======================================================
``tiny``    48 x ``Linear(32, 32)``              the library: a unit computes for 20 microseconds
``gpt``     the tutorial's GPT, 14 M parameters  realistic mix: compute, communication, optimizer
``wide``    4 x ``Linear(2048, 2048)``           communication: 16 MiB for each unit, little compute
==========  ===================================  =======================================================

`gpt-hybrid` runs on four ranks, in two groups of two. They have only two cores, so it uses a smaller GPT.

A step is that of a training loop: clear gradients, forward and backward for each micro-batch, one AdamW step. The seeds
of the batches are the numbers of the step, the micro-batch and the rank, so all contenders use the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_tests.oracles.compare import SAME_MATH
from tutorials.gpt.model import GPT, VOCABULARY, Block

Batch = tuple[Tensor, Tensor]
NODES = 2  # simulated nodes of a hybrid workload


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how to shard it.

    Attributes:
        name: name in the table.
        about: one line for the head of the table.
        build: builds the plain model, with the same weights after the same seed.
        unit_class: class whose instances become units, in addition to the root.
        draw: draws one batch.
        loss: computes the loss of one batch.
        strategy: FSDP1's name of the strategy.
        num_ranks: number of ranks.
        prefetch: whether to prefetch in forward, with the API of each FSDP.
        backward_prefetch: FSDP1's default. If false, no prefetching in backward; FSDP2 has no setting for this.
        bf16: all-gather parameters and reduce gradients in bfloat16; plain models run under autocast.
        accumulate: micro-batches in each step, all but the last without synchronization.
        rounds: number of timed steps, unless the run is a quick one.
        tolerance: maximum relative difference of losses.
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
        """Whether the ranks form `NODES` groups: sharded inside each group, replicated between groups."""
        return self.strategy == "HYBRID_SHARD"

    def settings(self) -> list[str]:
        """How it is sharded and trained, for the head of the table."""
        extras = {
            f"{self.num_ranks} ranks, {NODES} groups of {self.num_ranks // NODES}": self.is_hybrid,
            "each unit prefetches the next unit in forward": self.prefetch,
            "no prefetching in backward": not self.backward_prefetch,
            "bfloat16": self.bf16,
            f"{self.accumulate} micro-batches, `no_sync` in all but the last": self.accumulate > 1,
        }
        return [self.strategy, *(extra for extra, applies in extras.items() if applies)]

    def units_of(self, model: nn.Module) -> list[nn.Module]:
        """Units with parameters, in the order of forward, without the root."""
        return [module for module in model.modules() if isinstance(module, self.unit_class)]

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self.units_of(self.model()))

    def batches(self, step: int, rank: int) -> list[Batch]:
        """The micro-batches of one rank in one step."""
        seeds = [(step * self.accumulate + index) * 64 + rank for index in range(self.accumulate)]
        return [self.draw(torch.Generator().manual_seed(seed)) for seed in seeds]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all workloads."""
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
        # Plain models run under autocast, which rounds in other places.
        replace(GPT_14M, name="gpt-bf16", bf16=True, tolerance=5e-3),
        replace(GPT_14M, name="gpt-accumulate-4", accumulate=4, rounds=6),
        replace(GPT_14M, name="gpt-accumulate-4-grad-op", strategy="SHARD_GRAD_OP", accumulate=4, rounds=6),
        replace(GPT_14M, name="gpt-prefetch", prefetch=True),
        GPT_3M,
        WIDE,
        replace(WIDE, name="wide-grad-op", strategy="SHARD_GRAD_OP"),
        # This workload is for the comparison of memory.
        replace(WIDE, name="wide-no-prefetch", backward_prefetch=False, rounds=6),
    )
}
