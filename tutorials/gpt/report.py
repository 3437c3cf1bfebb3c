"""The output during and after the training: progress, and the memory of each rank."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from .data import Corpus
from .model import GPT
from .ranks import Place, from_all_ranks

__all__ = [
    "PACE",
    "Progress",
    "Stored",
    "count",
    "duration",
    "fact",
    "introduce",
    "machine_now",
    "mean_over_ranks",
    "measure",
    "print_stored",
    "readable",
]

PACE = 6  # number of steps before the remaining time is estimated


def fact(name: str, text: str) -> None:
    """Prints one line of the report: a name in the left column, then a text."""
    print(f"{name:<11} {text}", flush=True)


def readable(text: bytes) -> str:
    """Bytes as printable text: control characters and non-ASCII bytes are shown as escape sequences."""
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in text)


def mean_over_ranks(value: Tensor) -> float:
    """The mean of one number over all ranks. It calls a collective of four bytes, so every rank must call it."""
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def introduce(options: Namespace, corpus: Corpus, place: Place, model: GPT) -> None:
    """Prints a summary of the planned run, on one rank. ``model`` is the plain model, before the sharding."""
    in_blocks, in_all = count(model.blocks), count(model)
    ahead = f"backward prefetch {options.prefetch}" + (", forward prefetch" if options.forward_prefetch else "")
    ranks = f"{place.num_ranks} rank" + ("s" if place.num_ranks > 1 else "")
    print(f"A GPT over bytes on {ranks} ({place.device.type}, {place.backend})\n")
    if place.remark:
        fact("device", place.remark)
    fact("machine", machine_now())
    fact("text", f"{corpus.num_files} files of Python's standard library, {corpus.num_bytes:,} bytes")
    fact("sha256", corpus.sha256)
    fact(
        "model",
        f"{in_all:,} parameters: {in_blocks // options.blocks:,} in each of {options.blocks} blocks, "
        f"{in_all - in_blocks:,} in the root",
    )
    who = "torch and minifsdp" if options.compare else f"{options.library}, {options.api}"
    fact("sharding", f"{who}, {options.strategy}, {ahead}")
    fact("steps", f"{options.steps}, of {ranks} x {options.batch} windows x {options.context} bytes\n")


def machine_now() -> str:
    """The number of cores, and their load in the last minute, before this run."""
    cores = f"{os.cpu_count()} cores"
    # Not every system measures the load.
    return f"{cores}, load {os.getloadavg()[0]:.1f} before this run" if hasattr(os, "getloadavg") else cores


def count(module: nn.Module) -> int:
    """The number of elements in all parameters. Shared parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


class Progress:
    """A progress bar with the loss and the tokens per second. Without a terminal, it prints about ten lines instead.

    After `PACE` steps, it estimates the remaining time. The estimate excludes the first step, which is slower because
    it allocates memory and opens connections.

    Args:
        num_steps: total number of steps.
        num_done: number of steps of earlier runs.
        tokens_per_step: number of tokens of all ranks.
        shown: ``True`` on one rank only. On the other ranks, all methods do nothing.
    """

    def __init__(self, num_steps: int, num_done: int, tokens_per_step: int, *, shown: bool) -> None:
        self.num_steps, self.num_done, self.tokens_per_step = num_steps, num_done, tokens_per_step
        self.shown, self.started = shown, time.perf_counter()
        self.second_began = self.started
        # A progress bar is invisible on a pseudo-terminal that reports zero lines.
        watched = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 1
        form = "training    {bar:32} {n_fmt}/{total_fmt} steps{postfix}, {remaining} left"
        self.bar = tqdm(total=num_steps, initial=num_done, bar_format=form) if shown and watched else None

    def advance(self, step: int, loss: float) -> None:
        """Shows that step ``step``, counted from 0, is complete, and its loss."""
        if not self.shown:
            return
        now, done = time.perf_counter(), step + 1 - self.num_done
        speed = self.tokens_per_step * done / (now - self.started)
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif step == 0 or step == self.num_steps - 1 or (step + 1) % max(1, self.num_steps // 10) == 0:
            fact("training", f"step {step + 1:>5} of {self.num_steps}   loss {loss:6.3f}   {speed:>9,.0f} tokens/s")
        if done == 1:
            self.second_began = now
        elif done == PACE and step + 1 < self.num_steps:
            left = (self.num_steps - step - 1) * (now - self.second_began) / (PACE - 1)
            self.remark("will take", f"about {duration(left)} more, as fast as steps 2 to {PACE} of this run; "
                        "longer if other programs use the machine, too")  # fmt: skip

    def remark(self, name: str, text: str) -> None:
        """Prints a line of the report like `fact`, above the progress bar."""
        if self.bar is not None:
            self.bar.write(f"{name:<11} {text}")
        elif self.shown:
            fact(name, text)

    def close(self) -> float:
        """Ends the bar; returns the seconds since the start."""
        if self.bar is not None:
            self.bar.close()
        return time.perf_counter() - self.started


def duration(seconds: float) -> str:
    """The duration as rounded text, such as ``40 seconds`` or ``3 minutes``."""
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{round(seconds) if seconds < 10 else 5 * round(seconds / 5)} seconds"
    return f"{seconds / 60:.0f} minutes"


@dataclass(frozen=True)
class Stored:
    """Bytes that one rank stores between two steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def together(self) -> int:
        """The sum of all three."""
        return self.parameters + self.gradients + self.optimizer


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Stored:
    """The bytes that this rank stores. Call it between a backward and ``zero_grad``, while gradients exist."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Stored(_num_bytes(parameters), _num_bytes(gradients), _num_bytes(states))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    # `numel()` of a DTensor is that of the unsharded tensor, but a rank stores only its local shard.
    mine = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in mine)


def print_stored(mine: Stored, num_parameters: int, *, speaks: bool) -> None:
    """Prints the bytes that each rank stores, with and without sharding. Every rank must call it, and one rank prints.

    Without sharding, a float32 parameter has 4 bytes, its gradient 4, and the two averages of AdamW 8.
    """
    all_ranks = from_all_ranks(mine)
    if not speaks:
        return
    whole = 4 * num_parameters
    rows = {f"rank {rank}": stored for rank, stored in enumerate(all_ranks)}
    rows["not sharded"] = Stored(whole, whole, 2 * whole)
    print(f"\n{'stored, bytes':<14}{'parameters':>14}{'gradients':>14}{'optimizer':>14}{'together':>14}")
    for name, stored in rows.items():
        numbers = (stored.parameters, stored.gradients, stored.optimizer, stored.together)
        print(f"{name:<14}" + "".join(f"{number:>14,}" for number in numbers))
