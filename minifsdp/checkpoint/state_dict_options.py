"""The form of a state dict: three types, their configurations, and how they are set.

The same weights can be saved in three forms. A unit with one weight of shape (3, 2) on two ranks::

    FULL       rank 0 {"weight": 3 x 2}            rank 1 {"weight": 3 x 2}     or {} with rank0_only
    SHARDED    rank 0 {"weight": rows 0 and 1}     rank 1 {"weight": row 2}
    LOCAL      rank 0 {"flat_param": 3 elements}   rank 1 {"flat_param": 3 elements}

The full form works with any program, and is the largest. The sharded one works with any number of ranks, through
``torch.distributed.checkpoint``. The local one needs no communication and only works in the run that saved it.

The form applies to a whole tree and is stored in its wrappers, because ``state_dict()`` has no argument for it. It is
set permanently, or for the duration of a ``with`` block.

*In torch:* the classes are in ``api.py``, the three functions are static methods of the wrapper.

Spec: SD-CFG-01 to SD-CFG-18.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from minifsdp.engine.messages import message


class StateDictType(Enum):
    """The form of a state dict; see the table above."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """The keys of an optimizer state dict: original parameter names, or numbers as in a plain optimizer."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Base class; use a subclass.

    Attributes:
        offload_to_cpu: move values to the CPU, unit by unit.
        use_dtensor: sharded values are ``DTensor`` instead of ``ShardedTensor``.
    """

    offload_to_cpu: bool = False
    use_dtensor: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For the full form. ``rank0_only``: the first rank gets all entries, the others an empty dict."""

    rank0_only: bool = False


class LocalStateDictConfig(StateDictConfig):
    """For the local form."""


class ShardedStateDictConfig(StateDictConfig):
    """For the sharded form."""


@dataclass
class OptimStateDictConfig:
    """Base class for optimizer state dicts; use a subclass."""

    offload_to_cpu: bool = True
    use_dtensor: bool = False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For the full form."""

    rank0_only: bool = False


class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For the sharded form."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For the local form, which stays on its device."""

    offload_to_cpu: bool = False


@dataclass
class StateDictSettings:
    """A type with the configurations for the model and for the optimizer."""

    state_dict_type: StateDictType | None = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig | None = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig | None = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_for(
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """The settings of a type with the given configurations; ``None`` means the default of the type.

    Raises:
        RuntimeError: a configuration belongs to another type.
    """
    if not isinstance(state_dict_type, StateDictType):
        members = ", ".join(f"StateDictType.{member.name}" for member in StateDictType)
        raise RuntimeError(message("state-dict-type", members=members, state_dict_type=state_dict_type))
    given = {"state_dict_config": state_dict_config, "optim_state_dict_config": optim_state_dict_config}
    chosen: list[Any] = []
    for (name, config), own in zip(given.items(), _CONFIGS[state_dict_type], strict=True):
        found = own() if config is None else config
        if type(found) is not own:
            expected, kind = own.__name__, type(found).__name__
            raise RuntimeError(
                message("config-type", name=name, expected=expected, state_dict_type=state_dict_type, type=kind)
            )
        chosen.append(found)
    return StateDictSettings(state_dict_type, *chosen)


def common_settings(all_settings: Sequence[tuple[str, StateDictSettings]]) -> StateDictSettings:
    """The common setting of all units, each given with its name; all ``None`` if there is no unit.

    Raises:
        AssertionError: two units differ.
    """
    if not all_settings:
        return StateDictSettings(None, None, None)
    first_name, first = all_settings[0]
    for name, other in all_settings:
        if other != first:
            raise AssertionError(message("mixed-settings", first_name=first_name, first=first, name=name, other=other))
    return first
