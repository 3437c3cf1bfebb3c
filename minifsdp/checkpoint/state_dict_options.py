"""The form of a state dict: three types, their configurations, and how they are set.

The same weights can be saved in three forms. A unit with one weight of shape (3, 2) on two ranks::

    FULL       rank 0 {"weight": 3 x 2}            rank 1 {"weight": 3 x 2}     or {} with rank0_only
    SHARDED    rank 0 {"weight": rows 0 and 1}     rank 1 {"weight": row 2}
    LOCAL      rank 0 {"flat_param": 3 elements}   rank 1 {"flat_param": 3 elements}

The full form works with any program, and is the largest. The sharded one works with any number of ranks, through
``torch.distributed.checkpoint``. The local one needs no communication and only works in the run that saved it.

The form applies to a whole tree and is stored in its wrappers, because ``state_dict()`` has no argument for it. It is
set permanently, or for the duration of a ``with`` block. The wrappers also store the values that their hooks exchange
while ``nn.Module`` walks over the tree.

*In torch:* the classes are in ``api.py``, the three functions are static methods of the wrapper.

Spec: SD-CFG-01 to SD-CFG-18.
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self

from torch import nn

from minifsdp.engine.messages import message
from minifsdp.fsdp1.wrapper import Wrapper, clean_name


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
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For the full form.

    Attributes:
        offload_to_cpu: move values to the CPU, unit by unit.
        rank0_only: the first rank gets all entries, the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For the local form.

    Attributes:
        offload_to_cpu: move the local shards to the CPU.
    """


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For the sharded form.

    Attributes:
        offload_to_cpu: move this rank's rows to the CPU.
        _use_dtensor: values are ``DTensor`` instead of ``ShardedTensor``. A wrapper with a ``device_mesh`` always has
            ``DTensor`` values.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base class for optimizer state dicts; use a subclass.

    Attributes:
        offload_to_cpu: move values to the CPU, unit by unit.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For the full form.

    Attributes:
        offload_to_cpu: move values to the CPU, unit by unit.
        rank0_only: the first rank gets the state, the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For the sharded form.

    Attributes:
        offload_to_cpu: move this rank's rows to the CPU.
        _use_dtensor: values are ``DTensor`` instead of ``ShardedTensor``. A wrapper with a ``device_mesh`` always has
            ``DTensor`` values.
    """

    _use_dtensor: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For the local form. The optimizer's state then has the sharded form.

    Attributes:
        offload_to_cpu: move this rank's rows to the CPU; off by default.
    """

    offload_to_cpu: bool = False


@dataclass
class StateDictSettings:
    """A type with the configurations for the model and for the optimizer.

    Attributes:
        state_dict_type: the form; ``None`` if a module has no unit.
        state_dict_config: the configuration for the model, of the class that belongs to the form.
        optim_state_dict_config: the configuration for the optimizer, of the class that belongs to the form.
    """

    state_dict_type: StateDictType | None
    state_dict_config: StateDictConfig | None
    optim_state_dict_config: OptimStateDictConfig | None


_CONFIGS: dict[
    StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]
] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (
        ShardedStateDictConfig,
        ShardedOptimStateDictConfig,
    ),
}


def settings_for(state_dict_type: StateDictType, *configs: Any) -> StateDictSettings:
    """The settings of a type with two configurations, for the model and the optimizer; ``None`` means the default.

    Raises:
        RuntimeError: a configuration belongs to another type.
    """
    if not isinstance(state_dict_type, StateDictType):
        members = ", ".join(map(str, StateDictType))
        raise RuntimeError(
            message("state-dict-type", members=members, state_dict_type=state_dict_type)
        )
    chosen: list[Any] = []
    names = ("state_dict_config", "optim_state_dict_config")
    for name, config, own in zip(
        names, configs, _CONFIGS[state_dict_type], strict=True
    ):
        chosen.append(own() if config is None else config)
        if type(chosen[-1]) is not own:
            raise RuntimeError(
                message(
                    "config-type",
                    name=name,
                    expected=own.__name__,
                    state_dict_type=state_dict_type,
                    type=type(config).__name__,
                )
            )
    return StateDictSettings(state_dict_type, *chosen)


@dataclass(frozen=True)
class Form:
    """The form in which values are saved or loaded.

    Attributes:
        type: full values, this rank's rows, or the local shard.
        offload: values are moved to the CPU; otherwise they stay on their device.
        first_only: only the first rank gets the result, or provides the dict to load.
        use_dtensor: rows are ``DTensor`` or, if False, ``ShardedTensor``. With ``None``, they are ``DTensor`` if the
            wrapper was given a mesh.
        is_complete: full values are plain tensors also with tensor parallelism, and only its first rank is the first;
            otherwise they are the ``DTensor``s of tensor parallelism.
    """

    type: StateDictType = StateDictType.FULL_STATE_DICT
    offload: bool = True
    first_only: bool = False
    use_dtensor: bool | None = None
    is_complete: bool = False

    @classmethod
    def of(
        cls,
        type: StateDictType | None,
        config: StateDictConfig | OptimStateDictConfig | None,
    ) -> Self:
        """The form for a model's settings; a model without units has no settings and gets the full form."""
        if type is None or config is None:
            return cls()
        use_dtensor = getattr(config, "_use_dtensor", False) or None
        return cls(
            type,
            config.offload_to_cpu,
            getattr(config, "rank0_only", False),
            use_dtensor,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether values are rows."""
        return self.type is StateDictType.SHARDED_STATE_DICT

    @property
    def is_local(self) -> bool:
        """Whether the value is the unit's local shard."""
        return self.type is StateDictType.LOCAL_STATE_DICT


# ---- the wrappers of a tree -----------------------------------------------------------------------------------------


class StateDictState:
    """The values that a wrapper stores for its state dict.

    Attributes:
        settings: the chosen type and its configurations.
        before: when saving, the entries that the dict had before.
        is_strict: when loading, whether missing and unexpected keys are errors.
        runs_custom_code: whether custom code in the unit gets its parameters during the walk (``state_dict.py``).
        unsharded: when loading, the parameters that are unsharded during the walk.
        own_keys: when loading, the keys that the wrapper loads itself, and whether the dict has each of them.
    """

    def __init__(self) -> None:
        self.settings = settings_for(StateDictType.FULL_STATE_DICT, None, None)
        self.before: Mapping[str, Any] = {}
        self.is_strict = self.runs_custom_code = False
        self.unsharded = ExitStack()
        self.own_keys: dict[str, bool] = {}

    @property
    def form(self) -> Form:
        """The form of the model's state."""
        return Form.of(self.settings.state_dict_type, self.settings.state_dict_config)


def state_of(wrapper: Wrapper) -> StateDictState:
    """The values that a wrapper stores in ``_state_dict_state``."""
    return vars(wrapper)["_state_dict_state"]  # type: ignore[no-any-return]


def named_wrappers(module: nn.Module) -> list[tuple[str, Wrapper]]:
    """All wrappers in ``module`` with their paths, once for each place in the tree."""
    return [
        (path, inner)
        for path, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, Wrapper)
    ]


def set_type(
    module: nn.Module, state_dict_type: StateDictType, *configs: Any
) -> StateDictSettings:
    """Sets the form for all units in ``module``; returns the previous one. Raises the errors of both calls."""
    settings = settings_for(state_dict_type, *configs)
    before = get_type(module)
    for wrapper in Wrapper.fsdp_modules(module):
        state_of(wrapper).settings = settings
    return before


def get_type(module: nn.Module) -> StateDictSettings:
    """The common settings of all units in ``module``; all ``None`` if there is no unit.

    Raises:
        AssertionError: two units differ.
    """
    found = [
        (clean_name(path), state_of(wrapper).settings)
        for path, wrapper in named_wrappers(module)
    ]
    first_name, first = found[0] if found else ("", StateDictSettings(None, None, None))
    for name, other in found:
        if other != first:
            raise AssertionError(
                message(
                    "mixed-settings",
                    first_name=first_name,
                    first=first,
                    name=name,
                    other=other,
                )
            )
    return first


def form_for_optimizer(model: nn.Module) -> Form:
    """The form of the optimizer's state that is set for all units in ``model``; the sharded one in place of the local.

    A local dict would contain shards of flat parameters, which only the optimizers of this run have.
    """
    settings = get_type(model)
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    type = StateDictType.SHARDED_STATE_DICT if is_local else settings.state_dict_type
    return Form.of(type, settings.optim_state_dict_config)


@contextmanager
def type_in_block(
    module: nn.Module, state_dict_type: StateDictType, *configs: Any
) -> Generator[None]:
    """`set_type` for the duration of a ``with`` block."""
    before = set_type(module, state_dict_type, *configs)
    try:
        yield
    finally:
        for wrapper in Wrapper.fsdp_modules(module):
            state_of(wrapper).settings = before
