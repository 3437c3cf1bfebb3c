"""Values that nothing has set, after a model was built on the meta device.

A model on the meta device has shapes and no memory. ``to_empty`` makes the memory, and what stands in it is what was
there before: often zeros, sometimes the weights of another layer, always plausible. Each module is then expected to set
what it owns in its ``reset_parameters``; and buffers, above all those that are in no checkpoint, are what it forgets. A
table of rotary frequencies that is all zeros trains to a worse model, and says nothing.

So while the check is on

1. what ``to_empty`` makes is filled with ``nan``, and integers with the largest value of their dtype;
2. when the wrapper has made a unit real, what is left of that is listed in a warning. It may yet be loaded;
3. when a model is first used, through either door, what is left of it on any rank is an error on all of them.

Worked example, two ranks, a module with ``weight`` of 4 elements, which ``reset_parameters`` sets, and the buffer
``inverse`` of 2, which it does not::

    to_empty          weight nan nan nan nan    inverse nan nan
    reset             weight .1  .2  -.1 .3     inverse nan nan       warning: 'inverse' has no values

Memory that is made in other ways, by ``torch.empty_like`` in a ``param_init_fn`` for instance, is not seen.

*In torch:* ``torch.utils.deterministic.fill_uninitialized_memory`` fills it, together with all other such memory, and
only while deterministic algorithms are asked for; nothing is listed.

Spec: DEBUG-08, DEBUG-09.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from minifsdp.checkpoint.agreement import groups_of, some, tell
from minifsdp.debugging.attach import attached
from minifsdp.debugging.first_use import at_first_use, late_units_named
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.messages import message, warn
from minifsdp.engine.partition import local_part
from minifsdp.engine.root import Root
from minifsdp.fsdp1.wrapper import Wrapper, clean_name

Named = Iterable[tuple[str, torch.Tensor]]
# Whose memory was made by `to_empty`.
_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def filled_and_named() -> Iterator[None]:
    """Inside the block fresh memory is filled, and what is left of that is named."""
    with ExitStack() as stack:
        stack.enter_context(late_units_named("meta"))
        stack.enter_context(attached(nn.Module, "to_empty", after=_after_to_empty))
        stack.enter_context(attached(Wrapper, "_initialize", after=_after_initialize))
        stack.enter_context(at_first_use(_refuse_unset))
        yield


# --- 1. filling ---


def _after_to_empty(_: nn.Module, module: nn.Module, *, device: Any, recurse: bool = True) -> None:
    for inner in module.modules() if recurse else [module]:
        _made.add(inner)
        for _name, tensor in _own(inner):
            _fill(tensor)


def _own(module: nn.Module) -> Named:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in both if tensor is not None]


@torch.no_grad()
def _fill(tensor: torch.Tensor) -> None:
    values = local_part(tensor.detach())
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype is not torch.bool:
        values.fill_(torch.iinfo(values.dtype).max)


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether some of it is as `_fill` has left it; of integers, whether all are, as a single one may be meant."""
    values = local_part(tensor.detach())
    if values.is_meta or not values.numel() or values.dtype is torch.bool:
        return False
    if values.is_floating_point() or values.is_complex():
        return bool(values.isnan().any())
    return bool((values == torch.iinfo(values.dtype).max).all())


# --- 2. when a unit was made real ---


def _after_initialize(_: None, wrapper: Wrapper, modules: list[tuple[str, nn.Module]], options: Any) -> None:
    names = [
        full_name(path, name)
        for path, module in modules
        if module in _made
        for name, tensor in _own(module)
        if _is_unset(tensor)
    ]
    if names:
        warn(message("left-unset", names=some(names), type=type(wrapper.module).__name__))


# --- 3. when a model is used ---


def _refuse_unset(modules: Sequence[nn.Module], tree: Root) -> None:
    mine = [*_unset_in_units(tree), *_unset_outside(modules, tree)]
    who: dict[str, list[str]] = {}
    for rank, names in tell(groups_of(plan.mesh for unit in tree.units for plan in unit.plans), mine).items():
        for name in names:
            who.setdefault(name, []).append(str(rank))
    if who:
        names = [f"{name!r} (rank {', '.join(ranks)})" for name, ranks in who.items()]
        raise RuntimeError(message("used-unset", names=some(names)))


def _unset_in_units(tree: Root) -> Iterator[str]:
    for unit in tree.units:
        pieces = zip(unit.layout.parameters, _pieces(unit.layout), strict=True)
        for owned, piece in pieces:
            if any(slot.module in _made for slot in owned.slots) and _is_unset(piece):
                yield unit.layout.full_name(owned.path)


def _pieces(layout: Layout) -> list[torch.Tensor]:
    """What this rank stores of each parameter."""
    if isinstance(layout, FlatLayout):
        row = layout.local_values()
        return [row[piece] for piece in layout.partition.slices_of_piece(layout.mesh.shard_index)]
    return list(layout.local_parameters())


def _unset_outside(modules: Sequence[nn.Module], tree: Root) -> Iterator[str]:
    """Buffers, and parameters that belong to no unit."""
    owned = {parameter for unit in tree.units for parameter in unit.layout.local_parameters()}
    for root in modules:
        for path, module in root.named_modules():
            if module in _made:
                for name, tensor in _own(module):
                    if tensor not in owned and _is_unset(tensor):
                        yield full_name(clean_name(path), name)
