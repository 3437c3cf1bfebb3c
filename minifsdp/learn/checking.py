"""What the checks of the exercises use: conditions with an explanation, and a short training on this process's rank.

Worked example: ``expect(False, "too-short", got=3)`` raises `NotMetError` with the entry ``too-short``. The grader looks
up its text among the texts of the exercise, and inserts the value.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


class NotMetError(Exception):
    """A requirement is not met.

    Args:
        entry: the text that explains it.
        **values: values for the text.
    """

    def __init__(self, entry: str, /, **values: object) -> None:
        super().__init__(entry)
        self.entry, self.values = entry, values


def expect(condition: object, entry: str, /, **values: object) -> None:
    """Raises `NotMetError` if the condition is false."""
    if not condition:
        raise NotMetError(entry, **values)


def small_model() -> nn.Sequential:
    """A model with three layers of uneven sizes and equal values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def train(
    shard: Callable[[nn.Module], nn.Module], values_of: Callable[[nn.Module], dict[str, torch.Tensor]], num_steps: int = 3
) -> None:
    """Trains a sharded model on all ranks and the plain model in this process, and compares the values of both.

    Args:
        shard: shards the model.
        values_of: returns the unsharded values of the sharded model by name.
        num_steps: number of steps.
    """
    rank, num_ranks, plain = dist.get_rank(), dist.get_world_size(), small_model()
    model = shard(small_model())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(num_steps):
        batch = torch.linspace(-1, 1, 12 * num_ranks).view(4 * num_ranks, 3) + step
        for each, part in ((plain, batch), (model, batch.chunk(num_ranks)[rank])):
            each(part).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for name, value in values_of(model).items():
        right = expected[name].detach()
        expect(value.shape == right.shape, "train-shape", name=name, got=tuple(value.shape), right=tuple(right.shape))
        off = (value - right).abs().max().item() if value.numel() else 0.0
        expect(off < 1e-4, "train-values", name=name, off=f"{off:.2g}", num_steps=num_steps, num_ranks=num_ranks)
