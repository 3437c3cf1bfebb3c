"""From the pieces that ranks hold back to whole parameters, without asking the library that cut them.

A test of a sharding library that lets the library itself put the pieces together again proves only that it is
consistent. So here pieces are collected by hand. A wrapper of the FSDP1 kind, torch's or ours, shows one of two things
in ``named_parameters()``:

* one ``_flat_param`` for each unit: this rank's piece of all parameters of the unit, end to end, padded at the end;
* with ``use_orig_params=True`` the original names, each with the elements of it that lie on this rank, 1-D, maybe none.

Worked example, a unit with ``weight`` of shape (2, 2) and ``bias`` of shape (1), two ranks::

                 flat                    original names
    rank 0       w w w                   weight: w w w    bias: (nothing)
    rank 1       w b .                   weight: w        bias: b
    gathered     w w w w b .             weight: w w w w  bias: b

In both cases the pieces, one after the other in the order of ranks, are what was cut. It remains to know which elements
belong to whom. The order is that of a walk over the unit's modules, shared parameters once, parameters of inner units
left out, and a *plain* copy of the model can be walked just as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "Chunks",
    "as_numbers",
    "clean_name",
    "from_numbers",
    "flat_chunks",
    "gather_chunks",
    "split_by_name",
    "units_of",
    "wrap_units",
]

Chunks = dict[str, tuple[Tensor, Tensor | None]]
Shapes = dict[str, torch.Size]

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
FLAT_NAME = "_flat_param"


def clean_name(name: str) -> str:
    """The name that a parameter has in the plain model, or for a flat parameter the name of its unit."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(FLAT_NAME).removesuffix(".") if name.endswith(FLAT_NAME) else name


def wrap_units(model: nn.Module, unit_classes: tuple[type[nn.Module], ...], wrap: Callable[[nn.Module], Any]) -> Any:
    """Replaces each unit inside the model by ``wrap(unit)``, inner ones first and each once, and last the model."""
    wrapped: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        # Not named_children(): that leaves out the second name of a shared module, which must be replaced too.
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
    """By unit: the names and shapes of its parameters in the order in which they are laid out; the root is ``""``.

    Args:
        model: the plain model.
        unit_classes: what will be wrapped.
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
    """What this rank holds, values and gradient, both 1-D and on the CPU.

    The keys are the names of units, or the names of parameters if the wrapper shows those.
    """
    return {
        clean_name(name): (_row(p), None if p.grad is None else _row(p.grad)) for name, p in model.named_parameters()
    }


def _row(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to("cpu", copy=True)


def gather_chunks(chunks: Chunks, group: dist.ProcessGroup | None) -> Chunks:
    """The chunks of all ranks of the group, one after the other; every rank of it must call this.

    A gradient that only some ranks have is zero on the others; one that nobody has stays absent.

    Args:
        chunks: what this rank holds.
        group: those who share; ``None`` if nobody does, and what this rank holds is the whole.
    """
    if group is None:
        return chunks
    # As lists of numbers, which are exact: to pickle so many small tensors takes ten times as long.
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(
        everybody, {key: [as_numbers(row) for row in rows] for key, rows in chunks.items()}, group=group
    )
    return {key: _joined([[from_numbers(row) for row in of_rank[key]] for of_rank in everybody]) for key in chunks}


def as_numbers(tensor: Tensor | None) -> Any:
    """All of a tensor as what is pickled quickly; numbers are exact."""
    return None if tensor is None else (tensor.tolist(), tensor.dtype, tensor.shape)


def from_numbers(numbers: Any, device: torch.device | str = "cpu") -> Tensor | None:
    """The reverse."""
    return None if numbers is None else torch.tensor(numbers[0], dtype=numbers[1], device=device).view(numbers[2])


def _joined(pieces: list[Any]) -> tuple[Tensor, Tensor | None]:
    values = torch.cat([value for value, _ in pieces])
    if all(gradient is None for _, gradient in pieces):
        return values, None
    return values, torch.cat([torch.zeros_like(v) if gradient is None else gradient for v, gradient in pieces])


def split_by_name(chunks: Chunks, units: dict[str, Shapes]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The full parameters, and the full gradients of those that have one, by name.

    Args:
        chunks: gathered ones.
        units: how the plain model is divided, from `units_of`.
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
    # What is left over at the end is padding.
    pieces = row.split([*sizes, padding])
    return [(name, piece.view(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=False)]
