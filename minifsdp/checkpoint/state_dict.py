"""Saving the model's state: full, sharded, local.

``nn.Module.state_dict()`` walks over the tree and saves the registered tensors of every module. In a wrapped tree these
are shards under the name ``_flat_param``. So each wrapper replaces the entries of its own unit during the walk, right
after its own part of the tree::

    before the walk     placeholders are registered under the original names, so that keys have the usual order; real
                        parameters where a module has custom code (``custom_state.py``)
    after the walk      full: the unit is all-gathered, each placeholder replaced by a copy of the full value, and the
                        bucket freed; sharded: the same with this rank's rows; local: one entry, the local shard
    and                 the wrapper's prefix is removed from all names

All of this happens in the first hook of the wrapper, so the user's own hooks on a wrapper get the finished dict.

The dict of a plain ``nn.Module`` contains the module's own tensors, so it changes with every step. Here most values are
new tensors from an all-gather. The outermost wrapper copies the others, so that the dict does not change: buffers,
ignored parameters, and tensors that a module's custom code has added (``shared_tensors.py``).

One unit is all-gathered at a time, so in addition to the result at most one unit is unsharded. If a module has custom
code, an outer unit and an inner one can be unsharded at the same time.

Loading is in ``state_dict_load.py``.

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
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import all_gather_values, check_idle
from minifsdp.fsdp1.wrapper import Wrapper


def shown_to_walk(unit: FlatUnit | None, *, is_looked_at: bool) -> AbstractContextManager[None]:
    """Registers a tensor under each original name during the walk. All ranks of the unit's mesh must enter and exit.

    Args:
        unit: the unit to save.
        is_looked_at: whether a user's hook or module runs during the walk and may read parameters.
    """
    if unit is None or unit.layout.is_summoned:
        return nullcontext()
    if is_looked_at:
        return full_parameters(unit, writeback=False)
    check_idle(unit)
    return nullcontext() if unit.layout.use_orig_params else _place_holders(unit)


@contextmanager
def _place_holders(unit: FlatUnit) -> Generator[None]:
    """Registers empty tensors for hidden original parameters, so that the walk writes keys in their order."""
    slots = slots_of(unit)
    for slot in slots:
        slot.module._parameters[slot.name] = nn.Parameter(torch.empty(0), requires_grad=False)
    try:
        yield
    finally:
        for slot in slots:
            del slot.module._parameters[slot.name]


def write_unit(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    """Replaces the placeholders in ``state`` by the unit's values. All ranks of the unit's mesh must call it."""
    state.pop(codec.flat_key, None)
    is_wanted = codec.mesh.is_first or not form.first_only
    if form.is_local:
        for _, key in codec.keys:
            state.pop(key, None)
        state[codec.local_key] = codec.local_shard(form)
    elif not codec.layout.is_summoned:
        with _gathered(codec.unit) as full_values:
            if is_wanted:
                values = [codec.formed(full, form, full.device) for full in full_values]
                state.update({key: values[number] for number, key in codec.keys})
    elif is_wanted:
        _finish(codec, form, state)


def _finish(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    """Converts values that the walk has written to the form. They are real, and custom code may have changed them."""
    for key in {key for _, key in codec.keys if isinstance(state.get(key), torch.Tensor)}:
        state[key] = codec.formed(state[key].detach(), form, state[key].device)
    # Also entries under other names: a view of one element would keep, and save, the whole bucket.
    shown = [slot.module._parameters.get(slot.name) for slot in slots_of(codec.unit)]
    keep_apart(state, codec.prefix, [tensor for tensor in shown if tensor is not None], {})


def write_rest(wrapper: Wrapper, form: Form, state: MutableMapping[str, Any], prefix: str) -> None:
    """Converts the buffers of the wrapper's own modules to the dtype that the user gave them. Skips ignored modules.

    A local dict keeps the compute dtype, because it is only for the same run (MP-10).
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
    """Every parameter's full value. All ranks of the unit's shard group must enter and exit it."""
    layout, group = unit.layout, unit.plan.mesh.shard
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("AG", unit.name, num_bytes=layout.num_bytes, ranks=group.ranks, stream="gather")
    yield layout.views_of(all_gather_values(layout))
    if trace.recorder is not None and group is not None:
        trace.recorder.begin("FREE", unit.name, num_bytes=layout.num_bytes)
