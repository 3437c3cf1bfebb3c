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
from torch.distributed.checkpoint.state_dict import StateDictOptions

from minifsdp import FullyShardedDataParallel, fully_shard, get_model_state_dict
from minifsdp.engine.events import events

CPU = torch.device("cpu")
NUM_STEPS = 3


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


def train(shard: Callable[[nn.Module], nn.Module]) -> None:
    """Trains a sharded model on all ranks and the plain model in this process, and compares the values of both."""
    num_ranks = dist.get_world_size()
    plain = small_model()
    model = shard(small_model())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(NUM_STEPS):
        batch = torch.linspace(-1, 1, 12 * num_ranks).view(4 * num_ranks, 3) + step
        plain(batch).square().mean().backward()
        model(batch.chunk(num_ranks)[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    trained: dict[str, Any] = get_model_state_dict(model, options=full)
    for name, value in trained.items():
        right = plain.state_dict()[name]
        is_close = value.shape == right.shape and torch.allclose(
            value, right, atol=1e-4
        )
        expect(
            {"train-values": is_close},
            name=name,
            num_steps=NUM_STEPS,
            num_ranks=num_ranks,
        )


def wrapped(model: nn.Module) -> nn.Module:
    """The model in the wrapper, with a unit for the first layer."""
    model[0] = FullyShardedDataParallel(model[0], device_id=CPU)  # type: ignore[index, operator]
    return FullyShardedDataParallel(model, device_id=CPU)


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with ``fully_shard``, with units for two of its layers."""
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(model)


def wrapper_trains() -> None:
    """The wrapper of FSDP1 trains as one process."""
    train(wrapped)


def fully_shard_trains() -> None:
    """``fully_shard`` trains as one process."""
    train(fully_sharded)


def both_train() -> None:
    """Both APIs train as one process."""
    wrapper_trains()
    fully_shard_trains()
