"""Helpers for the tests of the engine: a sharded `chain` of blocks, its state and its gradients.

On each rank, a plain model computes the expected gradients of the sharded model. It runs one backward for each rank's
part of the batch and averages the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine.unit import Unit
from spec_tests.harness import device
from spec_tests.models.running import batch
from spec_tests.oracles.gathering import clean_name
from spec_tests.subject import FullyShardedDataParallel as FSDP

Loss = Callable[[nn.Module, int], Tensor]


def shard_each(model: nn.Module, **options: Any) -> FSDP:
    """Shards the model: each child becomes a unit, and the model itself becomes the root."""
    for name, child in list(model.named_children()):
        setattr(model, name, FSDP(child, device_id=device(), **options))
    return FSDP(model, device_id=device(), **options)


def draw(rank: int, step: int = 0) -> Tensor:
    """One rank's part of the batch of a step. It differs between ranks and between steps."""
    return batch(step, rank, width=3)


def square_loss(model: nn.Module, rank: int) -> Tensor:
    """Runs one forward and returns a loss."""
    return model(draw(rank)).square().mean()


def units_of(model: FSDP) -> list[Unit]:
    """All units of a wrapped model, outer ones first."""
    return [wrapper._unit for wrapper in FSDP.fsdp_modules(model) if wrapper._unit is not None]


def full_gradients(model: FSDP) -> dict[str, Tensor | None]:
    """The reduced gradient of every parameter, assembled from all ranks. ``None`` if the unit has no gradient here.

    All ranks must call it.
    """
    found: dict[str, Tensor | None] = {}
    for prefix, wrapper in model.named_modules():
        if not isinstance(wrapper, FSDP) or wrapper._unit is None:
            continue
        layout: Any = wrapper._unit.layout
        local_shard = _gradient_piece(layout)
        views = [None] * len(layout.param_infos) if local_shard is None else _put_together(layout, local_shard)
        for owned, view in zip(layout.param_infos, views, strict=True):
            found[clean_name(f"{prefix}.{owned.path}".removeprefix("."))] = view
    return found


def _gradient_piece(layout: Any) -> Tensor | None:
    parameters = layout.local_parameters
    if parameters[0] is layout.registered.shard:
        return layout.registered.shard.grad
    if all(p.grad is None for p in parameters):
        return None
    local_shard = torch.zeros_like(layout.registered.shard)
    ranges = layout.sharding.param_ranges(layout.mesh.shard_index)
    for part, p in zip(ranges, parameters, strict=True):
        if p.grad is not None:
            local_shard[part] = p.grad.reshape(-1)
    return local_shard


def _put_together(layout: Any, local_shard: Tensor) -> list[Tensor]:
    row, group = local_shard, layout.mesh.shard
    if group is not None:
        local_shards = [torch.empty_like(local_shard) for _ in range(group.size)]
        dist.all_gather(local_shards, local_shard, group=group.process_group)
        row = torch.cat(local_shards)
    padding = row[layout.sharding.numel :]
    assert padding.eq(0).all(), f"rank {dist.get_rank()}: the padding of a gradient is {padding}"
    return layout.sharding.views(row, [info.shape for info in layout.param_infos])


def mean_gradients(plain: nn.Module, loss: Loss, ranks: range | None = None) -> dict[str, Tensor | None]:
    """The expected gradients: those of an unsharded model, averaged over the batches of all ranks."""
    ranks = ranks or range(dist.get_world_size())
    parts = []
    for rank in ranks:
        plain.zero_grad()
        loss(plain, rank).backward()
        parts.append({clean_name(name): p.grad for name, p in plain.named_parameters()})
    plain.zero_grad()
    names = parts[0].keys()
    return {name: _mean([part[name] for part in parts]) for name in names}


def _mean(gradients: list[Tensor | None]) -> Tensor | None:
    known = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(known).sum(0) / len(gradients) if known else None


def assert_gradients(model: FSDP, expected: dict[str, Tensor | None]) -> None:
    """Checks that the sharded model has these gradients. All ranks must call it."""
    found = full_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        here = found[name]
        assert (here is None) == (gradient is None), f"{name}: {here} instead of {gradient}"
        if gradient is not None:
            torch.testing.assert_close(here, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def train_once(model: FSDP, loss: Loss = square_loss) -> None:
    """Runs one forward and backward with this rank's part of the batch."""
    loss(model, dist.get_rank()).backward()
