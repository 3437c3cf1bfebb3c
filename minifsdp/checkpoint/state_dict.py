"""Writing the model's state: full, sharded, local.

``nn.Module.state_dict()`` walks over the tree and writes down what every module has registered. In a wrapped tree that
is a slice under the name ``_flat_param``. So each wrapper corrects, for its own unit, what the walk has written, and
it does that while the walk goes on, right after its own part of the tree::

    before the walk     place holders are registered under the original names, so that keys come in the usual order;
                        real parameters where a module has custom code (``custom_state.py``)
    after the walk      full: the unit is gathered, each place holder replaced by a copy of the full value, the gathered
                        row dropped; sharded: the same with this rank's rows; local: one entry, the slice
    and                 the wrapper's prefix is taken out of all names

All of that is done in a hook that is the wrapper's first, so the user's own hooks on a wrapper find a finished dict.

``nn.Module`` hands out its own tensors, and whoever keeps such a dict sees it change with every step. Here most values
have just been gathered, so the others are brought in line: what still lies in memory of the model when the outermost
wrapper has been written, buffers, ignored parameters, or what a module's custom code has put there, is copied.

One unit is gathered at a time, so at no moment is there more than one unit in full size, beside what the user asked to
be given; with code of its own in the way, an outer unit beside an inner one.

Reading goes the other way, in ``state_dict_load.py``.

*In torch:* ``_state_dict_utils.py``, 932 lines of hooks in three families.

Spec: SD-FULL, SD-SHARD, SD-LOCAL, MP-04, MP-10, IGN-08, NAMES-10.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minifsdp import trace
from minifsdp.checkpoint import chunks, shared_tensors
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.custom_state import full_parameters, shown_in_full
from minifsdp.checkpoint.names import plain_path
from minifsdp.engine.flat_parameter import FLAT_NAME
from minifsdp.engine.summoned import full_row
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import check_idle

LOCAL_NAME = "flat_param"


@contextmanager
def shown_to_walk(unit: FlatUnit | None, *, is_looked_at: bool) -> Generator[None]:
    """While the walk goes on: something under each original name. All ranks of the unit's mesh must enter and leave it.

    Args:
        unit: what is to be written.
        is_looked_at: whether a user's hook or module runs while it is written, and may look at parameters.
    """
    if unit is None or shown_in_full(unit) is not None:
        yield
    elif is_looked_at:
        with full_parameters(unit, writeback=False):
            yield
    else:
        check_idle(unit)
        with _place_holders(unit):
            yield


@contextmanager
def _place_holders(unit: FlatUnit) -> Generator[None]:
    """Tensors of no elements where the originals are hidden, so that the walk writes keys in their order."""
    if not unit.layout.hides_originals:
        yield
        return
    slots = [slot for owned in unit.layout.parameters for slot in owned.slots]
    for slot in slots:
        slot.module._parameters[slot.name] = nn.Parameter(torch.empty(0), requires_grad=False)
    try:
        yield
    finally:
        for slot in slots:
            del slot.module._parameters[slot.name]


def write_unit(codec: UnitCodec, form: Form, state: MutableMapping[str, Any], prefix: str) -> None:
    """Puts the unit's values where the walk has written place holders. All ranks of the unit's mesh must call it.

    Args:
        codec: of the unit.
        form: in which form.
        state: what the walk has written.
        prefix: the unit's prefix in it.
    """
    state.pop(prefix + FLAT_NAME, None)
    if form.is_local:
        for _, key in codec.keys:
            state.pop(key, None)
        device = "cpu" if form.offload else codec.layout.device
        piece = codec.layout.local_values().to(device, copy=True)
        state[prefix + LOCAL_NAME] = piece if codec.group is None else chunks.from_local_slice(piece, codec.group)
        return
    is_wanted = codec.mesh.is_first or not form.first_only
    shown = shown_in_full(codec.unit)
    if shown is not None:
        if is_wanted:
            _finish(shown, codec, form, state, prefix)
        return
    keys: dict[int, list[str]] = {}
    for number, key in codec.keys:
        keys.setdefault(number, []).append(key)
    for number, full in enumerate(_gathered(codec.unit)):
        if is_wanted:
            state.update(dict.fromkeys(keys[number], codec.formed(full, form, full.device)))


def _finish(
    shown: Iterable[torch.Tensor], codec: UnitCodec, form: Form, state: MutableMapping[str, Any], prefix: str
) -> None:
    """What the walk has written is real already, and custom code may have changed it: only the form is left."""
    for key in {key for _, key in codec.keys if isinstance(state.get(key), torch.Tensor)}:
        state[key] = codec.formed(state[key].detach(), form, state[key].device)
    # Under a name of the module's own: a view of one element would keep, and save, the whole row.
    copy_what_lies_in({memory_of(tensor) for tensor in shown}, state, prefix)


def copy_what_lies_in(
    memory: set[int | None],
    state: MutableMapping[str, Any],
    prefix: str,
    may_share: Mapping[int | None, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Gives every tensor below ``prefix`` that lies in ``memory`` memory of its own, also one in a list or a dict.

    Args:
        memory: see `memory_of`.
        state: a dict of which part or all is below ``prefix``.
        prefix: the beginning of its keys.
        may_share: tensors of the model, by their memory, that the dict may have as they are; see ``shared_tensors.py``.
    """

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        where = memory_of(tensor)
        if where in may_share and shared_tensors.is_alike(tensor, may_share[where]):
            shared_tensors.share(tensor, may_share[where])
            return tensor
        return tensor.detach().clone() if where in memory else tensor

    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = tree_map_only(torch.Tensor, apart, state[key])


def memory_of(tensor: torch.Tensor) -> int | None:
    """What tells one piece of memory from another; ``None`` for all tensors that do not say, as sparse ones."""
    rows = chunks.local_rows(tensor)
    try:
        return (tensor if rows is None else rows).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def write_rest(
    modules: Iterable[tuple[str, nn.Module]],
    buffer_dtypes: Mapping[tuple[nn.Module, str], torch.dtype],
    form: Form,
    state: MutableMapping[str, Any],
    prefix: str,
) -> None:
    """Buffers of the wrapper's own modules, in the dtype that the user gave them. What is ignored stays as it is.

    A local dict keeps the dtype of compute, since it is meant for the very same run (MP-10).
    """
    for path, module in modules:
        for name in module._buffers:
            key = prefix + plain_path(f"{path}.{name}" if path else name)
            value = state.get(key)
            if value is None:
                continue
            dtype = value.dtype if form.is_local else buffer_dtypes.get((module, name), value.dtype)
            state[key] = value.to("cpu" if form.offload else value.device, dtype)


def _gathered(unit: FlatUnit) -> Iterable[torch.Tensor]:
    """Every parameter's full value, valid until the next one is asked for."""
    layout, group = unit.layout, unit.plan.mesh.shard
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("AG", unit.name, num_bytes=layout.num_bytes, ranks=group.ranks, lane="gather")
    row = full_row(layout)
    yield from layout.views_of(row)
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("FREE", unit.name, num_bytes=layout.num_bytes)
