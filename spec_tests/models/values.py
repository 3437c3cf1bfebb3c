"""Parameters and gradients: the expected values, and those of the sharded model.

The oracle is the same model, not sharded, in the same process. It computes the batches of all ranks one after the other
and averages the gradients. With two ranks, a sum of two numbers does not depend on their order, so the comparison is
bitwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.models.modules import WIDTH
from spec_tests.models.running import batch, loss_of
from spec_tests.oracles.gathering import clean_name
from spec_tests.subject import FullyShardedDataParallel

# --- the expected values ---


def own_names(model: nn.Module) -> dict[str, list[str]]:
    """Parameter names of the unwrapped model by unit, in the order in which the unit stores them."""
    units: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        units.setdefault(unit, []).append(name)
    return units


def mean_gradients(
    model: nn.Module, steps: Iterable[int] = (0,), num_ranks: int | None = None, width: int = WIDTH
) -> dict[str, Tensor]:
    """The gradients by name: the sum over ``steps``, averaged over all ranks. The ``grad`` of ``model`` stays empty."""
    num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
    total: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        of_rank = local_gradients(model, steps, rank, width)
        total = {name: total[name] + of_rank[name] for name in total} if total else of_rank
    return {name: gradient / num_ranks for name, gradient in total.items()}


def accumulated_gradients(model: nn.Module, *reductions: Iterable[int]) -> dict[str, Tensor]:
    """The gradients by name after several reductions without `zero_grad`, each of the sum over some steps."""
    of_reductions = [mean_gradients(model, steps) for steps in reductions]
    total = of_reductions[0]
    for gradients in of_reductions[1:]:
        total = {name: total[name] + gradients[name] for name in total}
    return total


def local_gradients(model: nn.Module, steps: Iterable[int], rank: int, width: int = WIDTH) -> dict[str, Tensor]:
    """The gradients by name: the sum over ``steps`` for one rank's batches."""
    model.zero_grad()
    for step in steps:
        loss_of(model(batch(step, rank, width))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients


def flattened(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By unit: the unit's tensors, concatenated. A unit that is not among ``tensors`` is left out."""
    units = {unit: names for unit, names in own_names(model).items() if names[0] in tensors}
    return {unit: torch.cat([tensors[name].detach().reshape(-1) for name in names]) for unit, names in units.items()}


def chunked(model: nn.Module, tensors: Mapping[str, Tensor], num: int, index: int) -> dict[str, Tensor]:
    """By unit: the ``index``-th of ``num`` equal shards of the unit's tensors, padded with zeros at the end."""
    local_shards = {}
    for unit, row in flattened(model, tensors).items():
        size = -(-row.numel() // num)
        padded = torch.cat([row, row.new_zeros(num * size - row.numel())])
        local_shards[unit] = padded[index * size : (index + 1) * size]
    return local_shards


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- the values of the sharded model ---


def flat_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By unit: the parameter that the optimizer updates. Works for our wrapper and for torch's."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def flat_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By unit: the gradient that the optimizer uses. A unit without a gradient is left out."""
    return {unit: p.grad for unit, p in flat_parameters(model).items() if p.grad is not None}


def full(tensor: Tensor) -> Tensor:
    """The unsharded tensor. Every rank of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded parameters by name, for either API. Every rank must call it."""
    if FullyShardedDataParallel.fsdp_modules(model):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return named(model)
    with torch.no_grad():
        return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded gradients by name, of the parameters that have one."""
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, bitwise: bool | None = None) -> None:
    """Checks for equal names, shapes, dtypes and values: bitwise on two ranks, within float tolerance elsewhere."""
    bitwise = dist.get_world_size() == 2 if bitwise is None else bitwise
    assert sorted(ours) == sorted(expected)
    for name, tensor in expected.items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            ours[name].detach(), tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
