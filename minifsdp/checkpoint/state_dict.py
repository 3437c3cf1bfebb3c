"""Writing the model's state: full, sharded, local.

``nn.Module.state_dict()`` walks over the tree and writes down what every module has registered. In a wrapped tree that
is a shard under the name ``_flat_param``. So each wrapper corrects, for its own unit, what the walk has written, and
it does that while the walk goes on, right after its own part of the tree::

    before the walk     place holders are registered under the original names, so that keys come in the usual order;
                        real parameters where a module has custom code (``custom_state.py``)
    after the walk      full: the unit is gathered, each place holder replaced by a copy of the full value, the gathered
                        row dropped; sharded: the same with this rank's rows; local: one entry, the shard
    and                 the wrapper's prefix is taken out of all names

All of that is done in a hook that is the wrapper's first, so the user's own hooks on a wrapper find a finished dict.

``nn.Module`` writes its own tensors, so such a dict changes with every step. Here most values have just been gathered.
The outermost wrapper copies the others, so that the dict does not change: buffers, ignored parameters, and what a
module's custom code has added (``shared_tensors.py``).

One unit is gathered at a time, so at no moment is there more than one unit in full size, beside what the user asked to
be given; where a module has custom code, an outer unit beside an inner one.

Reading goes the other way, in ``state_dict_load.py``.

*In torch:* ``_state_dict_utils.py``, 932 lines of hooks in three families.

Spec: SD-FULL, SD-SHARD, SD-LOCAL, MP-04, MP-10, IGN-08, NAMES-10.
"""

from collections.abc import Generator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from minifsdp import trace
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.custom_state import full_parameters, slots_of
from minifsdp.checkpoint.names import dotted
from minifsdp.checkpoint.shared_tensors import keep_apart
from minifsdp.engine.summoned import full_row
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import Wrapper


def shown_to_walk(unit: FlatUnit | None, *, is_looked_at: bool) -> AbstractContextManager[None]:
    """While the walk goes on: something under each original name. All ranks of the unit's mesh must enter and leave it.

    Args:
        unit: what is to be written.
        is_looked_at: whether a user's hook or module runs while it is written, and may look at parameters.
    """
    if unit is None or unit.layout.is_summoned:
        return nullcontext()
    if is_looked_at:
        return full_parameters(unit, writeback=False)
    check_idle(unit)
    return _place_holders(unit) if unit.layout.hides_originals else nullcontext()


@contextmanager
def _place_holders(unit: FlatUnit) -> Generator[None]:
    """Tensors of no elements where the originals are hidden, so that the walk writes keys in their order."""
    slots = slots_of(unit)
    for slot in slots:
        slot.module._parameters[slot.name] = nn.Parameter(torch.empty(0), requires_grad=False)
    try:
        yield
    finally:
        for slot in slots:
            del slot.module._parameters[slot.name]


def write_unit(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    """Puts the unit's values where the walk has written place holders. All ranks of the unit's mesh must call it."""
    state.pop(codec.flat_key, None)
    is_wanted = codec.mesh.is_first or not form.first_only
    if form.is_local:
        for _, key in codec.keys:
            state.pop(key, None)
        state[codec.local_key] = codec.local_piece(form)
    elif not codec.layout.is_summoned:
        with _gathered(codec.unit) as full_values:
            if is_wanted:
                values = [codec.formed(full, form, full.device) for full in full_values]
                state.update({key: values[number] for number, key in codec.keys})
    elif is_wanted:
        _finish(codec, form, state)


def _finish(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    """What the walk has written is real already, and custom code may have changed it: only the form is left."""
    for key in {key for _, key in codec.keys if isinstance(state.get(key), torch.Tensor)}:
        state[key] = codec.formed(state[key].detach(), form, state[key].device)
    # Under a name of the module's own: a view of one element would keep, and save, the whole row.
    shown = [slot.module._parameters.get(slot.name) for slot in slots_of(codec.unit)]
    keep_apart(state, codec.prefix, [tensor for tensor in shown if tensor is not None], {})


def write_rest(wrapper: Wrapper, form: Form, state: MutableMapping[str, Any], prefix: str) -> None:
    """Buffers of the wrapper's own modules, in the dtype that the user gave them. What is ignored stays as it is.

    A local dict keeps the dtype of compute, since it is meant for the very same run (MP-10).
    """
    for path, module in wrapper._own_modules():
        for name in module._buffers:
            key = prefix + dotted(path) + name
            value = state.get(key)
            if value is None:
                continue
            dtype = value.dtype if form.is_local else wrapper._buffer_dtypes.get((module, name), value.dtype)
            state[key] = value.to("cpu" if form.offload else value.device, dtype)


@contextmanager
def _gathered(unit: FlatUnit) -> Generator[list[torch.Tensor]]:
    """Every parameter's full value. All ranks of the unit's shard group must enter and leave it."""
    layout, group = unit.layout, unit.plan.mesh.shard
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("AG", unit.name, num_bytes=layout.num_bytes, ranks=group.ranks, lane="gather")
    yield layout.views_of(full_row(layout))
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("FREE", unit.name, num_bytes=layout.num_bytes)
