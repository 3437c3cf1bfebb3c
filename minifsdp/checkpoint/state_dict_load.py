"""Loading the model's state: full, sharded, local.

``nn.Module.load_state_dict()`` walks over the tree and copies into each module the values under the module's name. In a
wrapped tree the modules have no such parameters. So each wrapper removes its unit's values from the dict *before* the
walk, and copies this rank's shard of each. A full dict needs no communication, because each rank has all values.
Afterwards the wrapper corrects the lists of missing and unexpected keys, and their names.

A dict that does not fit raises an error earlier, see ``state_dict_check.py``. Worked example, a unit with a weight of 3
rows on two ranks, and a full dict: rank 0 copies the elements of its shard, rank 1 those of its own, and the key is
removed from the list of missing keys.

Modules with custom loading code (``_load_from_state_dict`` overridden, or a hook that renames keys) load their values
themselves: their code may accept a missing key, or a value with another shape. A unit with such a module is unsharded
during the walk, and its values stay in the dict. Afterwards each rank keeps its shard of the values that the walk has
loaded (see ``custom_state.py``).

*In torch:* hooks in ``_state_dict_utils.py``.

Spec: SD-FULL-08, SD-FULL-13, SD-SHARD-03, SD-LOCAL-03, NAMES-10.
"""

from collections.abc import MutableMapping
from typing import Any

import torch

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.names import keys_below, plain_path
from minifsdp.checkpoint.state_dict_check import OPENING
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper


def drop_own_tensors(wrapper: Wrapper, state: MutableMapping[str, Any], prefix: str) -> None:
    """Removes the wrapper's own shards and buffers from a dict, if they were added.

    ``set_model_state_dict`` of ``torch.distributed.checkpoint`` adds the model's registered tensors to a full dict, to
    complete it. But they have the names of the wrapped model; and if the dict lacks a key, a shard is added under the
    plain name.
    """
    units = [w._unit for w in Wrapper.fsdp_modules(wrapper) if w._unit is not None]
    cut = {id(p) for unit in units if unit.plan.mesh.shard is not None for p in unit.layout.local_parameters()}
    own = {id(tensor) for tensor in [*wrapper.parameters(), *wrapper.buffers()]} | cut
    for key in keys_below(state, prefix):
        name = key.removeprefix(prefix)
        is_wrapped = PREFIX in name
        is_double = is_wrapped and prefix + plain_path(name) in state
        if is_double or id(state[key]) in (own if is_wrapped else cut):
            del state[key]


class Reading:
    """Loads one wrapper's values from a state dict that fits.

    Args:
        wrapper: the wrapper.
        prefix: of the wrapped module in the dict.
        form: the form of the dict.
    """

    def __init__(self, wrapper: Wrapper, prefix: str, form: Form) -> None:
        self._codec = None if wrapper._unit is None else UnitCodec(wrapper, prefix)
        self._form = form
        self._missing: list[str] = []
        self._not_for_the_walk: set[str] = set()

    @chunks.unadvised()
    def before_walk(self, state: MutableMapping[str, Any]) -> None:
        """Removes the unit's values from ``state`` and copies this rank's shard of them, or leaves them for the walk.

        The walk loads them if modules have full parameters. For a sharded dict all ranks of the unit's mesh must call
        it.
        """
        codec = self._codec
        if codec is None:
            return
        if codec.layout.is_summoned and not self._form.is_local:
            # Rows are all-gathered into full tensors, because a module's custom code expects full tensors.
            for _, key in codec.keys:
                if chunks.local_rows(state.get(key)) is not None:
                    state[key] = codec.whole(state[key])
            return
        check_idle(codec.unit)
        # The walk will report these names as missing.
        self._not_for_the_walk = {codec.flat_key, *(key for _, key in codec.keys)}
        local_shard = self._given_local_shard(codec, state) if self._form.is_local else self._local_shard(codec, state)
        if local_shard is not None:
            codec.layout.overwrite_local(local_shard)

    def _local_shard(self, codec: UnitCodec, state: MutableMapping[str, Any]) -> torch.Tensor:
        given: dict[int, Any] = {}
        problems: list[str] = []
        for number, key in codec.keys:
            if key not in state:
                self._missing.append(key)
                continue
            given[number] = state.pop(key)
            # Checked again: custom code of an outer module may have changed it.
            problems.extend(codec.misfit(number, key, given[number], self._form))
        agreement.refuse_together([], problems, OPENING)
        local_shard = codec.layout.local_values().clone()
        for number, value in given.items():
            codec.lay(codec.whole(value), number, local_shard)
        return local_shard

    def _given_local_shard(self, codec: UnitCodec, state: MutableMapping[str, Any]) -> torch.Tensor | None:
        local_shard = codec.given_local_shard(state)
        for key in (codec.local_key, codec.flat_key):
            state.pop(key, None)
        if local_shard is None:
            self._missing.append(codec.local_key)
        return local_shard

    def after_walk(self, missing: list[str], unexpected: list[str]) -> None:
        """Corrects the lists of keys: removes keys that the unit has loaded, and converts names to plain names."""
        # The lists are those of the whole tree, and inner wrappers have already converted names: compare plain names.
        not_missing = set(map(plain_path, self._not_for_the_walk))
        missing[:] = [name for name in map(plain_path, missing) if name not in not_missing]
        missing.extend(map(plain_path, self._missing))
        unexpected[:] = map(plain_path, unexpected)
