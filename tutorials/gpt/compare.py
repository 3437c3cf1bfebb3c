"""Compares six ways to run the same training: a single process, DDP, and both FSDPs of torch and of minifsdp.

All six use the same initial weights, windows of text, optimizer and number of steps. In each step, the single process
trains on the windows of all ranks. Only the order of floating-point additions can differ, so the losses agree to six
digits or more, but not always to the last digit.

The table shows how many bytes each rank stores, how many bytes of parameters are unsharded at the same time, and how
many bytes each rank sends.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .counting import CollectiveCounter
from .data import Corpus, batch_of, global_batch
from .ranks import Place
from .report import Stored, fact, mean_over_ranks, measure

__all__ = ["Outcome", "compare"]


@dataclass(frozen=True)
class Outcome:
    """The result of one of the six ways, a *contender*, on this rank.

    Attributes:
        losses: of each step, the mean over all windows of all ranks.
        stored: bytes on this rank between two steps.
        peak_whole: the largest number of bytes of unsharded parameters on this rank at the same time. ``None`` for
            ``fully_shard``, which copies the all-gathered parameters to other tensors that the counter does not
            observe.
        milliseconds: the median time of a step.
        counter: the collectives of one step.
    """

    losses: list[float]
    stored: Stored
    peak_whole: int | None
    milliseconds: float
    counter: CollectiveCounter


def compare(
    options: Namespace,
    corpus: Corpus,
    place: Place,
    build: Callable[[Namespace, Place], nn.Module],
    shard: Callable[[nn.Module, str, str, Namespace, Place], nn.Module],
    train_step: Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor],
) -> None:
    """Trains all contenders, one after the other, and prints the table. Every rank must call it; rank 0 prints.

    Args:
        options: of the command line.
        corpus: the training text.
        place: of this rank.
        build: creates the plain model, always with the same weights.
        shard: shards a model with the given library and API.
        train_step: one step; returns the loss of this rank.
    """
    ids = [place.device] if place.device.type == "cuda" else None
    contenders: dict[str, Callable[[nn.Module], nn.Module]] = {
        "single": lambda model: model,
        "DDP": lambda model: DistributedDataParallel(model, device_ids=ids),
        "torch FSDP": lambda model: shard(model, "torch", "wrapper", options, place),
        "minifsdp": lambda model: shard(model, "minifsdp", "wrapper", options, place),
    }
    if options.strategy != "NO_SHARD":
        # `fully_shard` has no NO_SHARD; its equivalent is DDP.
        contenders["torch f_s"] = lambda model: shard(model, "torch", "fully_shard", options, place)
        contenders["mini f_s"] = lambda model: shard(model, "minifsdp", "fully_shard", options, place)
    outcomes = {}
    for name, wrap in contenders.items():
        begin = time.perf_counter()
        outcomes[name] = _train(options, corpus, place, wrap(build(options, place)), train_step, alone=name == "single")
        if place.speaks:
            fact(name, f"{options.steps} steps in {time.perf_counter() - begin:.1f} s")
    if place.speaks:
        _print_table(outcomes)


def _train(
    options: Namespace,
    corpus: Corpus,
    place: Place,
    model: nn.Module,
    train_step: Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor],
    *,
    alone: bool,
) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    window = {"seed": options.seed, "num_windows": options.batch, "context": options.context}
    losses, durations = [], []
    for step in range(options.steps):
        # For "single", each rank trains on the windows of all ranks, without communication.
        inputs, targets = (
            global_batch(corpus.train, num_ranks=place.num_ranks, step=step, **window)
            if alone
            else batch_of(corpus.train, rank=place.rank, step=step, **window)
        )
        inputs, targets = inputs.to(place.device), targets.to(place.device)
        dist.barrier()
        begin = time.perf_counter()
        # The counter watches the last step, so this step is not timed.
        counter = CollectiveCounter()
        if step == options.steps - 1:
            with counter:
                loss = train_step(model, optimizer, inputs, targets)
        else:
            loss = train_step(model, optimizer, inputs, targets)
        losses.append(mean_over_ranks(loss))
        durations.append(1000 * (time.perf_counter() - begin))
    milliseconds = statistics.median(durations[:-1] or durations)
    # Without all-gathers, every rank always stores the whole model.
    peak: int | None = counter.peak_gathered or whole
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        peak = None
    return Outcome(losses, measure(model, optimizer), peak, milliseconds, counter)


def _print_table(outcomes: dict[str, Outcome]) -> None:
    """Prints a column for each contender; all sizes in bytes and for one rank."""
    first = next(iter(outcomes.values())).losses[-1]
    kinds = ["all-gather", "reduce-scatter", "all-reduce"]
    kinds += sorted({kind for outcome in outcomes.values() for kind in outcome.counter.num_calls} - set(kinds))
    column = list(outcomes.values())
    rows: list[tuple[str, list[str]]] = [
        ("final loss", [f"{outcome.losses[-1]:.6f}" for outcome in column]),
        ("  less that of single", [_difference(outcome.losses[-1] - first) for outcome in column]),
        ("stored, bytes", []),
        ("  parameters", [f"{outcome.stored.parameters:,}" for outcome in column]),
        ("  gradients", [f"{outcome.stored.gradients:,}" for outcome in column]),
        ("  optimizer", [f"{outcome.stored.optimizer:,}" for outcome in column]),
        ("  together", [f"{outcome.stored.together:,}" for outcome in column]),
        (
            "peak unsharded, bytes",
            ["-" if outcome.peak_whole is None else f"{outcome.peak_whole:,}" for outcome in column],
        ),
        ("in each step", []),
        *((f"  {kind}s", [f"{outcome.counter.num_calls[kind]}" for outcome in column]) for kind in kinds),
        ("  bytes sent", [f"{outcome.counter.bytes_sent:,}" for outcome in column]),
        ("  milliseconds", [f"{outcome.milliseconds:.0f}" for outcome in column]),
    ]
    print(f"\n{'on each rank':<24}" + "".join(f"{name:>14}" for name in outcomes))
    for name, cells in rows:
        print((f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells)).rstrip())


def _difference(loss: float) -> str:
    return f"{loss:+.1e}" if loss else "0"
