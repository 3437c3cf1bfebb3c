"""A model to save and load, batches for it, and comparisons of the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spec_tests.harness import device
from spec_tests.models.modules import Uneven, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, StateDictType, fully_shard

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
full_or_sharded = pytest.mark.parametrize("form", [FULL, SHARDED], ids=["full", "sharded"])

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def make(seed: int = 0) -> Uneven:
    """A model with the same values on every rank and in every call."""
    return seeded(Uneven, seed)


def wrapped(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wraps ``first``, ``second`` and the rest as three units."""
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Sequential}))
    return FullyShardedDataParallel(model, **options)


def in_torch(model: nn.Module, **options: Any) -> torch_fsdp.FullyShardedDataParallel:
    """The same three units in torch's wrapper."""
    policy = torch_fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
    return torch_fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device(), **options)


def fully_sharded(model: Uneven, mesh: DeviceMesh | None = None) -> Any:
    """Shards the same three units with ``fully_shard``."""
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Ignores torch's deprecation warnings, because the reference implementation may use deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def step(
    model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, number: int, *, all_ranks: bool = False
) -> float:
    """Runs one training step and returns the loss.

    Args:
        model: the model that computes the loss.
        optimizer: the optimizer that updates the model.
        number: index of the step, which selects the batch.
        all_ranks: whether to average over the batches of all ranks, as a single process does.
    """
    optimizer.zero_grad()
    who: Iterable[int] = range(dist.get_world_size()) if all_ranks else [dist.get_rank()]
    losses = [loss_of(model(batch(number, rank, width=3))) for rank in who]
    loss = sum(losses[1:], losses[0]) / len(losses)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    """Training steps with the same batch on all ranks, so that the number of ranks does not change the mean."""
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model(batch(number, 0, width=3))).backward()
        optimizer.step()


def trained(
    kind: str = "adam", steps: int = 2, seed: int = 0, **options: Any
) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """A wrapped model and its optimizer after some training steps."""
    model = wrapped(make(seed), **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def single_process(kind: str = "adam", steps: int = 2) -> dict[str, dict[str, Any]]:
    """Optimizer states of the plain model by name, trained on the batches of all ranks."""
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for number in range(steps):
        step(model, optimizer, number, all_ranks=True)
    names = [name for name, _ in model.named_parameters()]
    return {names[key]: entries for key, entries in optimizer.state_dict()["state"].items()}


def is_plain(value: Any) -> bool:
    """Whether the value is a plain torch tensor, and not a parameter or a sharded tensor."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return type(value) is type(torch.empty(0, device=value.device))


def gathered(value: Any) -> Tensor:
    """The full tensor of a plain or sharded value. Every rank must call it."""
    if isinstance(value, DTensor):
        # The value may be offloaded, but collectives need tensors on the device.
        return value.to(device()).full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    local_shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(local_shards, [(s.metadata.shard_offsets, s.tensor.cpu()) for s in value.local_shards()])
    rows = sorted((offsets, tensor) for of_rank in local_shards for offsets, tensor in of_rank)
    return torch.cat([tensor for _, tensor in rows])


def assert_same_state(
    found: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]], *, bitwise: bool = True
) -> None:
    """Checks that optimizer states have equal keys, shapes, dtypes and values; both are keyed by name."""
    assert sorted(found) == sorted(expected)
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-4, "atol": 1e-6}
    for name, entries in expected.items():
        assert sorted(found[name]) == sorted(entries), name
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                assert found[name][key] == value, (name, key)
                continue
            torch.testing.assert_close(
                found[name][key].cpu(),
                value.cpu(),
                msg=lambda text, where=(name, key): f"{where}: {text}",
                **tolerance,
            )
