"""Debug check ``meta``: finds values that were not set after a model was built on the meta device.

A model on the meta device has shapes but no memory. ``to_empty`` allocates the memory without initializing it. It
contains previous data, often zeros, sometimes the weights of another layer. Each module must then set its own
parameters and buffers in ``reset_parameters``. Buffers are often forgotten, in particular those that are in no
checkpoint. For instance, a table of rotary frequencies that is all zeros trains to a worse model, without an error.

While the check is on:

1. ``to_empty`` fills the new memory with ``nan``, and integers with the largest value of their dtype;
2. after the wrapper has materialized a unit, a warning lists tensors that still have such values (a load may follow);
3. before a model is first used, through either API, such values on any rank raise an error on all ranks.

Worked example, two ranks, a module with ``weight`` of 4 elements, which ``reset_parameters`` sets, and the buffer
``inverse`` of 2, which it does not set::

    to_empty          weight nan nan nan nan    inverse nan nan
    reset             weight .1  .2  -.1 .3     inverse nan nan       warning: 'inverse' has no values

Memory that is allocated in other ways, for instance by ``torch.empty_like`` in a ``param_init_fn``, is not detected.

*In torch:* ``torch.utils.deterministic.fill_uninitialized_memory`` fills all such memory, but only while deterministic
algorithms are on; it reports nothing.

Spec: DEBUG-08, DEBUG-09.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from minifsdp.checks.details import some
from minifsdp.debugging.attach import at_first_use, attached, warn_about_late_units
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import RootState
from minifsdp.engine.shards import local_tensor
from minifsdp.fsdp1.wrapper import Wrapper, clean_name

# Modules whose memory was allocated by `to_empty`.
_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def check_unset() -> Iterator[None]:
    """Inside the block, fills new memory, and reports tensors that are not set later."""
    with (
        warn_about_late_units("meta"),
        attached(nn.Module, "to_empty", _after_to_empty),
        attached(Wrapper, "_initialize", _after_initialize),
        at_first_use(_refuse_unset),
    ):
        yield


# --- 1. filling ---


def _after_to_empty(
    _: nn.Module, module: nn.Module, *, device: Any, recurse: bool = True
) -> None:
    for inner in module.modules() if recurse else [module]:
        _made.add(inner)
        for _name, tensor in _own(inner):
            _fill(tensor)


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]


@torch.no_grad()
def _fill(tensor: torch.Tensor) -> None:
    values = local_tensor(tensor.detach())
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype is not torch.bool:
        values.fill_(torch.iinfo(values.dtype).max)


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether any value is still that of `_fill`; for integers, whether all are, because a single one may be valid."""
    values = local_tensor(tensor.detach())
    if values.is_meta or not values.numel() or values.dtype is torch.bool:
        return False
    if values.is_floating_point() or values.is_complex():
        return bool(values.isnan().any())
    return bool((values == torch.iinfo(values.dtype).max).all())


def _unset_in(
    modules: Iterable[tuple[str, nn.Module]], of_units: Set[torch.Tensor] = frozenset()
) -> Iterator[str]:
    """Names of the unset tensors that the modules own directly, except those in ``of_units``."""
    for path, module in modules:
        if module in _made:
            for name, tensor in _own(module):
                if tensor not in of_units and _is_unset(tensor):
                    yield full_name(clean_name(path), name)


# --- 2. after a unit was materialized ---


def _after_initialize(
    _: None,
    wrapper: Wrapper,
    modules: list[tuple[str, nn.Module]],
    *_arguments: Any,
    **_options: Any,
) -> None:
    if names := list(_unset_in(modules)):
        warn(
            message("left-unset", names=some(names), type=type(wrapper.module).__name__)
        )


# --- 3. before a model is used ---


def _refuse_unset(modules: Sequence[nn.Module], root_state: RootState) -> None:
    of_units = {
        parameter
        for unit in root_state.units
        for parameter in unit.layout.local_parameters
    }
    mine = list(_unset_in_units(root_state))
    for root in modules:
        # Buffers, and parameters that belong to no unit.
        mine += _unset_in(root.named_modules(), of_units)
    ranks_of: dict[str, list[str]] = {}
    for rank, names in exchange(
        groups_of(plan.mesh for unit in root_state.units for plan in unit.plans), mine
    ).items():
        for name in names:
            ranks_of.setdefault(name, []).append(str(rank))
    if names := [
        f"{name!r} (rank {', '.join(ranks)})" for name, ranks in ranks_of.items()
    ]:
        raise RuntimeError(message("used-unset", names=some(names)))


def _unset_in_units(root_state: RootState) -> Iterator[str]:
    for unit in root_state.units:
        for info, local_shard in zip(
            unit.layout.param_infos, _local_shards(unit.layout), strict=True
        ):
            if any(
                attribute.module in _made for attribute in info.places
            ) and _is_unset(local_shard):
                yield full_name(unit.layout.name, info.path)


def _local_shards(layout: Layout) -> list[torch.Tensor]:
    """This rank's shard of each parameter."""
    if isinstance(layout, FlatLayout):
        flat = layout.local_values()
        return [
            flat[part] for part in layout.sharding.param_ranges(layout.mesh.shard_index)
        ]
    return list(layout.local_parameters)
