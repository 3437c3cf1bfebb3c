"""Modules that ranks wrap differently, although all ranks issue the same collectives.

Spec: HEALTHY-04.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from spec_tests.healthy.programs.support import Net, Training, batch, fully_shard, late, rank, wrap

SECONDS = 2.6  # longer than the watchdog waits before it queries the other ranks


class Checkpointing(Net):
    """Recomputes its layers in backward on one rank only."""

    is_late = False

    def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
        for layer in self.layers:
            # Only for a long batch, which rank 0 has.
            x = checkpoint(layer, x, use_reentrant=False) if len(x) > 100 else layer(x)
            x = x.tanh()
            if self.is_late:
                late(SECONDS, on=0)
        return self.head(x)


def rows(of_rank: int) -> int:
    return 200 if of_rank == 0 else 2


def checkpoint_on_one_rank(api: str) -> None:
    """Activation checkpointing only where the batch is long; the rank that recomputes is late in the second step."""
    training = Training(api, Checkpointing(2))
    for step in range(3):
        for module in training.model.modules():
            if isinstance(module, Checkpointing):
                module.is_late = step == 1
        training.step(step, rows)
    training.check()


def checkpoint_wrapper_on_one_rank(api: str) -> None:
    """Rank 0 wraps its layers in `checkpoint_wrapper` before it shards them; the wrapper is not part of the names."""

    def change(net: Any) -> None:
        if rank() == 0:
            for index, layer in enumerate(net.layers):
                net.layers[index] = checkpoint_wrapper(layer)

    training = Training(api, change=change)
    for step in range(3):
        training.step(step)
    training.check()


def checkpoint_wrapper_around_units_on_one_rank(api: str) -> None:
    """Rank 1 wraps its sharded layers in `checkpoint_wrapper`, as a trainer does after sharding."""
    train_with_layers_inside(api, checkpoint_wrapper, of_rank=1)


def train_with_layers_inside(api: str, outer: Callable[[nn.Module], nn.Module], of_rank: int) -> None:
    """One rank puts its sharded layers into other modules before the first forward."""
    training = Training(api)
    if rank() == of_rank:
        layers = next(module for module in training.model.modules() if isinstance(module, Net)).layers
        for index, layer in enumerate(layers):
            layers[index] = outer(layer)
    for step in range(3):
        training.step(step)
    training.check()


class Compiled(nn.Module):
    """Holds a module under the name that `torch.compile` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *arguments: Any) -> Any:
        return self._orig_mod(*arguments)


class Replicated(nn.Module):
    """Holds a module under the name that `DistributedDataParallel` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


class Outer(nn.Module):
    """A `Net` with a body that a program can wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_on_one_rank(api: str) -> None:
    """Rank 0 has layers inside a module with the attribute `_orig_mod`, like a compiled module."""

    def change(net: Any) -> None:
        if rank() == 0:
            net.body = Compiled(net.body)
            net.layers[0] = Compiled(net.layers[0])

    training = Training(api, Outer(), change=change)
    for step in range(3):
        training.step(step)
    training.check()


def module_on_one_rank(api: str) -> None:
    """Rank 1 has layers inside a module with the attribute `module`, like a replicated module."""

    def change(net: Any) -> None:
        if rank() == 1:
            net.body = Replicated(net.body)
            net.layers[1] = Replicated(net.layers[1])

    training = Training(api, Outer(), change=change)
    for step in range(3):
        training.step(step)
    training.check()


def units_compiled_on_one_rank(api: str) -> None:
    """Rank 0 puts its sharded layers into modules with the attribute `_orig_mod`."""
    train_with_layers_inside(api, Compiled, of_rank=0)


def units_inside_module_on_one_rank(api: str) -> None:
    """Rank 0 puts its sharded layers into modules with the attribute `module`."""
    train_with_layers_inside(api, Replicated, of_rank=0)


class Around(nn.Module):
    """Layers in a `Sequential` with modules between them that are ignored, more of them on rank 1."""

    def __init__(self, num_ignored: int) -> None:
        super().__init__()
        middle = [Half() for _ in range(num_ignored)]
        self.layers = nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8), nn.Sequential(*middle, nn.Linear(8, 8)))
        self.tail = nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layers(x))


class Half(nn.Module):
    """Has a parameter that no API shards, and no effect on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def more_ignored_modules_on_one_rank(api: str) -> None:
    """Rank 1 has two ignored modules where rank 0 has one, so that indices of layers and of units differ."""
    torch.manual_seed(0)
    net: Any = Around(1 + rank())
    for parameter in net.parameters():
        if parameter.requires_grad:
            nn.init.constant_(parameter, 0.1)
    ignored = [module for module in net.modules() if isinstance(module, Half)]
    units = [net.layers[0], net.layers[-2], net.layers[-1], net.tail]
    if api == "wrapper":
        for index in (0, len(net.layers) - 2, len(net.layers) - 1):
            net.layers[index] = wrap(net.layers[index], ignored_modules=ignored)
        net.tail = wrap(net.tail, ignored_modules=ignored)
        net = wrap(net, ignored_modules=ignored)
    else:
        for unit in [*units, net]:
            fully_shard(unit, ignored_params={module.factor for module in ignored})
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        loss = net(batch(0, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[2] != losses[0]
    all_ranks: list[Any] = [None, None]
    dist.all_gather_object(all_ranks, losses)
    assert all_ranks[0] == all_ranks[1]


BOTH = [
    more_ignored_modules_on_one_rank,
    checkpoint_on_one_rank,
    checkpoint_wrapper_on_one_rank,
    checkpoint_wrapper_around_units_on_one_rank,
    compiled_on_one_rank,
    module_on_one_rank,
    units_compiled_on_one_rank,
    units_inside_module_on_one_rank,
]
ON_TWO = {"wrapper": BOTH, "fully_shard": BOTH}
