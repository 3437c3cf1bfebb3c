"""Tools of the checks of the exercises: conditions with an explanation, and a short training on this process's rank.

Worked example: ``expect({"too-short": False}, got=3)`` raises `NotMetError` with the entry ``too-short``. The grader
looks up its text among the texts of the exercise, and inserts the value.

*In torch:* no such tool.

Spec: LEARN-03.
"""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel, fully_shard
from minifsdp.engine.events import events

CPU = torch.device("cpu")


class NotMetError(Exception):
    """A requirement is not met.

    Args:
        entry: the text that explains it.
        **values: values for the text.
    """

    def __init__(self, entry: str, /, **values: object) -> None:
        super().__init__(entry)
        self.entry = entry
        self.values = values


def expect(conditions: Mapping[str, object], **values: object) -> None:
    """Raises `NotMetError` with the first entry whose condition is false."""
    for entry, condition in conditions.items():
        if not condition:
            raise NotMetError(entry, **values)


@contextmanager
def recorded_collectives(
    before: Callable[..., None] = lambda *_: None,
) -> Generator[tuple[list[str], dict[str, Any]]]:
    """Records the collectives that are issued inside the context.

    Args:
        before: is called with the name, the group and the arguments of each collective.

    Yields:
        The names of all collectives, and by name the handles whose ``wait`` was not called yet.
    """
    calls: list[str] = []
    running: dict[str, Any] = {}
    issue = events.collective

    def collective(
        kind: str, group: Any, data: Any, method: Any, arguments: Any, *others: Any
    ) -> Any:
        name = kind.replace("-", "_")
        before(name, group, arguments)
        calls.append(name)
        handle = running[name] = issue(kind, group, data, method, arguments, *others)
        return SimpleNamespace(wait=lambda: (running.pop(name, None), handle.wait()))

    with mock.patch.object(events, "collective", collective):
        yield calls, running


def replace_everywhere(old: Any, new: Any, prefix: str | tuple[str, ...]) -> None:
    """Replaces a function in the modules whose names begin with ``prefix``, which can have imported it by its name.

    The name of the learner's module begins with ``minifsdp`` and not with ``minifsdp.``, as that of the package's do.
    """
    for module in list(sys.modules.values()):
        if module.__name__.startswith(prefix):
            vars(module).update(
                {key: new for key, value in vars(module).items() if value is old}
            )


def small_model() -> nn.Sequential:
    """A model with three layers of uneven sizes and equal values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
    )


def train(
    shard: Callable[[nn.Module], nn.Module],
    values_of: Callable[[nn.Module], dict[str, torch.Tensor]],
    num_steps: int = 3,
) -> None:
    """Trains a sharded model on all ranks and the plain model in this process, and compares the values of both.

    Args:
        shard: shards the model.
        values_of: returns the unsharded values of the sharded model by name.
        num_steps: number of steps.
    """
    num_ranks = dist.get_world_size()
    plain = small_model()
    model = shard(small_model())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(num_steps):
        batch = torch.linspace(-1, 1, 12 * num_ranks).view(4 * num_ranks, 3) + step
        for each, part in (
            (plain, batch),
            (model, batch.chunk(num_ranks)[dist.get_rank()]),
        ):
            each(part).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for name, value in values_of(model).items():
        right = expected[name].detach()
        expect(
            {"train-shape": value.shape == right.shape},
            name=name,
            got=tuple(value.shape),
            right=tuple(right.shape),
        )
        off = (value - right).abs().max().item() if value.numel() else 0.0
        expect(
            {"train-values": off < 1e-4},
            name=name,
            off=f"{off:.2g}",
            num_steps=num_steps,
            num_ranks=num_ranks,
        )


def wrapped(model: nn.Module) -> nn.Module:
    """The model in the wrapper, with a unit for the first layer."""
    model[0] = FullyShardedDataParallel(model[0], device_id=CPU)  # type: ignore[index, operator]
    return FullyShardedDataParallel(model, device_id=CPU)


def summoned_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded values of a model in the wrapper."""
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with ``fully_shard``, with units for two of its layers."""
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(model)


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded values of a model with ``fully_shard``."""
    parameters: list[tuple[str, Any]] = [*model.named_parameters()]
    return {name: parameter.full_tensor().detach() for name, parameter in parameters}


def wrapper_trains() -> None:
    """The wrapper of FSDP1 trains as one process."""
    train(wrapped, summoned_values)


def fully_shard_trains() -> None:
    """``fully_shard`` trains as one process."""
    train(fully_sharded, full_values)


def both_train() -> None:
    """Both APIs train as one process."""
    wrapper_trains()
    fully_shard_trains()
