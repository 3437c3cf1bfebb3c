"""Assembles full parameters from the shards of all ranks, without the library that created the shards.

If a test of a sharding library lets the library itself assemble the shards, it only checks that the library is
consistent. This module therefore collects the shards manually. A wrapper of the FSDP1 kind, torch's or ours, has one of
two kinds of entries in ``named_parameters()``:

* one ``_flat_param`` per unit: this rank's shard of all parameters of the unit, concatenated and padded at the end;
* with ``use_orig_params=True`` the original names, each with its elements on this rank, 1-D and possibly empty.

Worked example, a unit with ``weight`` of shape (2, 2) and ``bias`` of shape (1), two ranks::

                 flat                    original names
    rank 0       w w w                   weight: w w w    bias: (nothing)
    rank 1       w b .                   weight: w        bias: b
    gathered     w w w w b .             weight: w w w w  bias: b

In both cases, concatenating the shards in the order of ranks gives the tensor that was sharded. To assign the elements
to parameters, the order of the parameters must be known. It is the order of a walk over the unit's modules: shared
parameters count once, and parameters of inner units are left out. A *plain* copy of the model gives the same walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Chunks = dict[str, tuple[Tensor, Tensor | None]]
Shapes = dict[str, torch.Size]

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
FLAT_NAME = "_flat_param"


def clean_name(name: str) -> str:
    """The name of a parameter in the plain model. For a flat parameter, the name of its unit."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(FLAT_NAME).removesuffix(".") if name.endswith(FLAT_NAME) else name


def wrap_units(model: nn.Module, unit_classes: tuple[type[nn.Module], ...], wrap: Callable[[nn.Module], Any]) -> Any:
    """Replaces each unit inside the model by ``wrap(unit)``, inner units first and each once, then wraps the model."""
    wrapped: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        # named_children() leaves out the second name of a shared module, which must be replaced too.
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            if child not in wrapped:
                visit(child)
                wrapped[child] = wrap(child) if isinstance(child, unit_classes) else child
            module._modules[name] = wrapped[child]

    visit(model)
    return wrap(model)


def units_of(model: nn.Module, unit_classes: tuple[type[nn.Module], ...]) -> dict[str, Shapes]:
    """By unit: the names and shapes of its parameters in the order in which they are stored. The root is ``""``.

    Args:
        model: the plain model.
        unit_classes: the classes of the modules that become units.
    """
    paths = {
        clean_name(name + ".").removesuffix(".") for name, m in model.named_modules() if isinstance(m, unit_classes)
    }
    units: dict[str, Shapes] = {}
    for raw_name, parameter in model.named_parameters():
        name = clean_name(raw_name)
        around = itertools.accumulate(name.split(".")[:-1], lambda path, part: f"{path}.{part}")
        innermost = max((path for path in around if path in paths), key=len, default="")
        units.setdefault(innermost, {})[name] = parameter.shape
    return units


def flat_chunks(model: nn.Module) -> Chunks:
    """This rank's values and gradients, both 1-D and on the CPU.

    The keys are the names of units, or the names of parameters if the wrapper shows original parameters.
    """
    return {
        clean_name(name): (_row(p), None if p.grad is None else _row(p.grad)) for name, p in model.named_parameters()
    }


def _row(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to("cpu", copy=True)


def gather_chunks(chunks: Chunks, group: dist.ProcessGroup | None) -> Chunks:
    """The concatenated chunks of all ranks of the group. Every rank of the group must call this.

    A gradient that only some ranks have is zero on the others. A gradient that no rank has stays absent.

    Args:
        chunks: the chunks of this rank.
        group: the ranks that share the parameters. ``None`` if this rank stores all of them.
    """
    if group is None:
        return chunks
    # Lists of numbers are exact, and pickling so many small tensors would take ten times as long.
    all_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(
        all_ranks, {key: [as_numbers(row) for row in rows] for key, rows in chunks.items()}, group=group
    )
    return {key: _joined([[from_numbers(row) for row in of_rank[key]] for of_rank in all_ranks]) for key in chunks}


def as_numbers(tensor: Tensor | None) -> Any:
    """A tensor in a form that is quick to pickle. The numbers are exact."""
    return None if tensor is None else (tensor.tolist(), tensor.dtype, tensor.shape)


def from_numbers(numbers: Any, device: torch.device | str = "cpu") -> Tensor | None:
    """The inverse of `as_numbers`."""
    return None if numbers is None else torch.tensor(numbers[0], dtype=numbers[1], device=device).view(numbers[2])


def _joined(local_shards: list[Any]) -> tuple[Tensor, Tensor | None]:
    values = torch.cat([value for value, _ in local_shards])
    if all(gradient is None for _, gradient in local_shards):
        return values, None
    return values, torch.cat([torch.zeros_like(v) if gradient is None else gradient for v, gradient in local_shards])


def split_by_name(chunks: Chunks, units: dict[str, Shapes]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The full parameters, and the full gradients of those that have one, by name.

    Args:
        chunks: the chunks of all ranks, from `gather_chunks`.
        units: the units of the plain model, from `units_of`.
    """
    every_shape = {name: shape for shapes in units.values() for name, shape in shapes.items()}
    values: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for key, (value, gradient) in chunks.items():
        shapes = units[key] if key in units else {key: every_shape[key]}
        values.update(_split(value, shapes))
        if gradient is not None:
            gradients.update(_split(gradient, shapes))
    return values, gradients


def _split(row: Tensor, shapes: Shapes) -> Iterable[tuple[str, Tensor]]:
    sizes = [shape.numel() for shape in shapes.values()]
    padding = row.numel() - sum(sizes)
    if padding < 0:
        raise AssertionError(f"{row.numel()} elements cannot hold {dict(shapes)}, {sum(sizes)} elements")
    # The remaining elements at the end are padding.
    local_shards = row.split([*sizes, padding])
    return [
        (name, local_shard.view(shape))
        for (name, shape), local_shard in zip(shapes.items(), local_shards, strict=False)
    ]
