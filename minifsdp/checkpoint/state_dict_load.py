"""Reading the model's state: full, sharded, local; and refusing what does not fit, on all ranks, before it is read.

``nn.Module.load_state_dict()`` walks over the tree and copies into each module what it finds under the module's name.
In a wrapped tree the modules have no such parameters. So each wrapper takes its unit's values out of the dict *before*
the walk looks for them, and keeps this rank's slice of each; nothing is gathered for a full dict, because everybody has
it. Afterwards it corrects the lists of missing and unexpected keys, and their names.

A dict that does not fit must be found out earlier. The walk finds a missing key when half of the model has been
overwritten; and for a sharded dict rows are gathered, so a rank that stops there leaves the others waiting. So the
outermost wrapper looks through the whole dict first, and the ranks compare what they found. Worked example, two ranks,
rank 1 has read a damaged file::

    rank 0 finds    nothing                                          raises, because of rank 1
    rank 1 finds    Missing key(s) in state_dict: "0.bias"           raises

and on both the model is as it was.

What a module reads with code of its own (``_load_from_state_dict`` overridden, or a hook that renames keys) is left to
that code: there a key may be missing on purpose, or a value have another shape. A unit with such a module in it is
gathered and shown in full while the walk goes on, its values stay in the dict, and afterwards each rank keeps its slice
of what the walk has made of them (see ``custom_state.py``).

*In torch:* hooks in ``_state_dict_utils.py``; a dict that does not fit is refused by whoever notices, halfway through.

Spec: SD-FULL-08, SD-FULL-09, SD-FULL-13, SD-SHARD-03, SD-LOCAL-03, SD-LOCAL-04, NAMES-10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.custom_state import full_parameters, reads_by_itself, shown_in_full
from minifsdp.checkpoint.state_dict import LOCAL_NAME, dotted, names_in_state, plain_path
from minifsdp.checkpoint.state_dict_options import StateDictSettings, StateDictType
from minifsdp.engine.flat_parameter import FLAT_NAME
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.base import PREFIX, WrapperBase
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import check_idle

# What nn.Module says first.
OPENING = "Error(s) in loading state_dict for FullyShardedDataParallel: "


# ---- does it fit? ---------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a dict must have below some prefix.

    Attributes:
        in_units: by key, shape and shard group of what belongs to a unit.
        rest: by key, the shape of everything else: buffers, ignored and plain parameters.
        optional: keys that may be missing.
        elsewhere: beginnings of keys that a module reads with code of its own.
    """

    in_units: dict[str, tuple[tuple[int, ...], Group | None]] = field(default_factory=dict)
    rest: dict[str, tuple[int, ...]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    elsewhere: list[str] = field(default_factory=list)

    def is_elsewhere(self, key: str) -> bool:
        """Whether a module has a say in what becomes of ``key``."""
        return any(key.startswith(start) for start in self.elsewhere)


@chunks.unadvised()
def refuse_misfit(
    wrapper: WrapperBase, settings: StateDictSettings, state: Mapping[str, Any], prefix: str, strict: bool
) -> None:
    """Raises on all ranks if the dict of any does not fit. All ranks of the units' groups must call it.

    Args:
        wrapper: the outermost one that reads.
        settings: the chosen form.
        state: the dict, with plain names.
        prefix: of the wrapper in it.
        strict: whether keys must be neither missing nor unexpected.

    Raises:
        StateDictMismatchError: with keys, expected, found, and ranks.
    """
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    wrappers = [
        (prefix + dotted(name), module)
        for name, module in wrapper.named_modules(remove_duplicate=False)
        if isinstance(module, WrapperBase)
    ]
    groups = agreement.groups_of(inner.mesh for _, inner in wrappers)
    agreement.monitored_barrier(groups, "load_state_dict()")
    if is_local:
        local = [problem for path, w in wrappers for problem in _local_problems(w._unit, state, path, strict)]
        agreement.refuse_together(groups, local, OPENING)
        return
    expected = _expected(wrapper, wrappers, prefix)
    problems = [*(_key_problems(state, prefix, expected) if strict else ())]
    is_sharded = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    problems.extend(_value_problems(state, expected, is_sharded))
    agreement.refuse_together(groups, problems, OPENING)
    if is_sharded:
        _check_equal_rows(state, expected, groups)


def drop_own_tensors(wrapper: WrapperBase, state: MutableMapping[str, Any], prefix: str) -> None:
    """Takes the wrapper's own slices and buffers out of a dict, if they were added.

    ``set_model_state_dict`` of ``torch.distributed.checkpoint`` adds to a full dict what the model has registered. It
    means to help, but those are under the names that things have while they are wrapped; and where the dict lacks a
    key, under the plain one, but a slice.
    """
    units = [w._unit for w in WrapperBase.fsdp_modules(wrapper) if w._unit is not None]
    cut = {id(p) for unit in units if unit.plan.mesh.shard is not None for p in unit.layout.local_parameters()}
    own = {id(tensor) for tensor in [*wrapper.parameters(), *wrapper.buffers()]} | cut
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        is_wrapped = PREFIX in name
        is_double = is_wrapped and prefix + plain_path(name) in state
        if is_double or id(state[key]) in (own if is_wrapped else cut):
            del state[key]


def _expected(wrapper: WrapperBase, wrappers: Iterable[tuple[str, WrapperBase]], prefix: str) -> Expected:
    expected = Expected()
    owned: set[int] = set()
    for path, inner in wrappers:
        unit = inner._unit
        if unit is not None:
            owned.update(map(id, unit.layout.local_parameters()))
            for number, name in names_in_state(unit, inner.module):
                shape = tuple(unit.layout.parameters[number].shape)
                expected.in_units[path + name] = (shape, unit.plan.mesh.shard)
    for path, module in wrapper.named_modules(remove_duplicate=False):
        start = prefix + dotted(path)
        if reads_by_itself(module, num_expected_hooks=int(isinstance(module, WrapperBase))):
            expected.elsewhere.append(start)
        if isinstance(module, WrapperBase) or hasattr(module, "_checkpoint_wrapped_module"):
            continue
        for name, tensor in _registered(module):
            key = start + name
            if key not in expected.in_units and id(tensor) not in owned:
                expected.rest[key] = tuple(tensor.shape)
                # Dicts of torch before 0.4.1 have no such count, and the layer does without.
                if name == "num_batches_tracked":
                    expected.optional.add(key)
        expected.optional.add(start + "_extra_state")
    return expected


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in module._non_persistent_buffers_set and not is_lazy(tensor):
            yield name, tensor


def _key_problems(state: Mapping[str, Any], prefix: str, expected: Expected) -> Iterator[str]:
    known = {**{key: shape for key, (shape, _) in expected.in_units.items()}, **expected.rest}
    missing = [key for key in known if key not in state and key not in expected.optional]
    for key in missing:
        if not expected.is_elsewhere(key):
            yield detail("key-missing", key=key, shape=known[key])
    for key in state:
        if (
            key.startswith(prefix)
            and key not in known
            and key not in expected.optional
            and not expected.is_elsewhere(key)
        ):
            yield detail("key-unexpected", key=key)


def _value_problems(state: Mapping[str, Any], expected: Expected, is_sharded: bool) -> Iterator[str]:
    """Values of a wrong shape, or in another form than the chosen one."""
    for key, shape in expected.rest.items():
        found = getattr(state.get(key), "shape", None)
        # One number without dimensions was saved as a tensor of one element long ago, and nn.Module still reads it.
        is_old = shape == () and found is not None and tuple(found) == (1,)
        if found is not None and tuple(found) != shape and not is_old and not expected.is_elsewhere(key):
            yield detail("size-mismatch", key=key, shape=shape, found=tuple(found))
    given = {key: state[key] for key in expected.in_units if key in state}
    for key, value in given.items():
        yield from _misfit(key, value, expected, is_sharded)
    cut = [
        (key, value)
        for key, value in given.items()
        if is_tensor_like(value) and expected.in_units[key][1] is not None and chunks.is_cut(value.size())
    ]
    # Single full tensors may come from units that were not sharded. But all of them are another form.
    if is_sharded and cut and all(chunks.local_rows(value) is None for _, value in cut):
        yield detail("all-full", where=cut[0][0])


def _misfit(key: str, value: Any, expected: Expected, is_sharded: bool) -> Iterator[str]:
    """What is wrong with one value of a unit, in words."""
    shape, group = expected.in_units[key]
    is_rows = chunks.local_rows(value) is not None
    if not is_tensor_like(value):
        yield detail("no-tensor", key=key, type=type(value).__name__)
    elif is_rows and not is_sharded:
        yield detail("full-expected", where=key, type=type(value).__name__)
    elif tuple(value.size()) != shape and not expected.is_elsewhere(key):
        yield detail("size-mismatch-of-unit", key=key, shape=shape, found=tuple(value.size()))
    elif is_rows and tuple(value.size()) == shape:
        yield from chunks.misplaced_rows(value, key, group)


def _local_problems(unit: FlatUnit | None, state: Mapping[str, Any], prefix: str, strict: bool) -> Iterator[str]:
    if unit is None:
        return
    where, value, mine = prefix + LOCAL_NAME, _local_value(state, prefix), unit.layout.local_values()
    if value is None:
        if strict:
            yield detail("local-missing", where=where, expected=mine.numel())
        return
    local = chunks.local_rows(value)
    found = value.numel() if local is None else local.numel()
    if found != mine.numel() or value.dtype is not mine.dtype:
        yield detail(
            "local-size", where=where, found=found, mine=mine.numel(), found_dtype=value.dtype, dtype=mine.dtype
        )


def _local_value(state: Mapping[str, Any], prefix: str) -> Any:
    return next((state[prefix + name] for name in (LOCAL_NAME, FLAT_NAME) if prefix + name in state), None)


def _check_equal_rows(state: Mapping[str, Any], expected: Expected, groups: list[Group]) -> None:
    """Rows are gathered key by key, so all ranks must have some of the same ones."""
    mine = {key for key in expected.in_units if key in state and chunks.local_rows(state[key]) is not None}
    everywhere = set.union(*agreement.tell(groups, mine).values())
    problems = [detail("rows-lacking-of-unit", key=key) for key in sorted(everywhere - mine)]
    agreement.refuse_together(groups, problems, OPENING)


# ---- reading --------------------------------------------------------------------------------------------------------


class Reading:
    """One wrapper's part in reading a state dict that fits.

    Args:
        unit: the wrapper's unit, if it has one.
        module: the wrapped module.
        settings: in which form the dict is.
        is_looked_at: whether a user's hook or module runs while the unit is read, and may look at parameters.
    """

    def __init__(
        self, unit: FlatUnit | None, module: nn.Module, settings: StateDictSettings, *, is_looked_at: bool
    ) -> None:
        self._unit, self._module, self._settings, self._is_looked_at = unit, module, settings, is_looked_at
        self._full_parameters = ExitStack()
        self._missing: list[str] = []
        self._own_names: set[str] = set()

    @chunks.unadvised()
    def before_walk(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Takes the unit's values out of ``state`` and copies this rank's part of them, or lets the walk read them.

        For a sharded dict, or with modules that read by themselves, all ranks of the unit's mesh must call it.
        """
        unit = self._unit
        if unit is None:
            return
        is_local = self._settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
        is_shown = shown_in_full(unit) is not None
        if not is_local and (is_shown or self._is_looked_at):
            if not is_shown:
                self._full_parameters.enter_context(full_parameters(unit, writeback=True))
            self._make_whole(unit, state, prefix)
            return
        check_idle(unit)
        # Under these names the walk will miss something. They are looked up now and not remembered from construction:
        # an activation checkpoint may have been put around the module since.
        # After a forward modules may show other objects than the optimizer owns, under the same names.
        owned = set(unit.layout.local_parameters())
        named = self._module.named_parameters(remove_duplicate=False)
        self._own_names = {prefix + name for name, parameter in named if parameter in owned}
        self._own_names.update(prefix + name for _, name in names_in_state(unit, self._module))
        if is_local:
            self._read_local(unit, state, prefix)
            return
        given: dict[int, Any] = {}
        problems: list[str] = []
        for number, name in names_in_state(unit, self._module):
            key = prefix + name
            if key not in state:
                self._missing.append(key)
                continue
            given[number] = state.pop(key)
            # Looked at once more: a module further out may have had its own way with it.
            expected = Expected({key: (tuple(unit.layout.parameters[number].shape), unit.plan.mesh.shard)})
            problems.extend(_misfit(key, given[number], expected, self._is_sharded))
        agreement.refuse_together([], problems, OPENING)
        unit.layout.overwrite({number: _whole(unit, number, value) for number, value in given.items()})

    @property
    def _is_sharded(self) -> bool:
        return self._settings.state_dict_type is StateDictType.SHARDED_STATE_DICT

    def _make_whole(self, unit: FlatUnit, state: MutableMapping[str, Any], prefix: str) -> None:
        """Rows become full tensors, because a module's custom code knows of nothing else."""
        for number, name in names_in_state(unit, self._module):
            if chunks.local_rows(state.get(prefix + name)) is not None:
                state[prefix + name] = _whole(unit, number, state[prefix + name])

    def close(self) -> None:
        """Ends what `before_walk` has begun, if the walk was broken off before `after_walk`."""
        self._full_parameters.close()

    def _read_local(self, unit: FlatUnit, state: MutableMapping[str, Any], prefix: str) -> None:
        value = _local_value(state, prefix)
        for name in (LOCAL_NAME, FLAT_NAME):
            state.pop(prefix + name, None)
        if value is None:
            self._missing.append(prefix + LOCAL_NAME)
            return
        local = chunks.local_rows(value)
        unit.layout.overwrite_local(value if local is None else local)

    def after_walk(self, missing: list[str], unexpected: list[str]) -> None:
        """Corrects the lists of keys: what the walk did not find is there, and names are those of the plain module."""
        self._full_parameters.close()

        # The lists are those of the whole tree, and inner wrappers have been here before: compare plain names.
        def plain(names: Iterable[str]) -> list[str]:
            return [plain_path(name) for name in names]

        own = set(plain(self._own_names))
        missing[:] = [name for name in plain(missing) if name not in own] + plain(self._missing)
        unexpected[:] = plain(unexpected)


def _whole(unit: FlatUnit, number: int, value: Any) -> torch.Tensor:
    """The whole of a value: rows that are spread over the ranks are gathered."""
    if chunks.local_rows(value) is None:
        if isinstance(value, torch.Tensor):
            return value
        # A stand-in of a framework that reads files late gives its values when it is copied from.
        return torch.empty(tuple(value.size()), dtype=value.dtype).copy_(value)
    shape = unit.layout.parameters[number].shape
    return chunks.gathered_rows(value, shape, unit.plan.mesh.shard, unit.layout.device)
