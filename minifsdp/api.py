"""What the user may choose, under the name that it has in torch: ``from minifsdp.api import ShardingStrategy``.

The classes, and what there is to read about them, are in ``fsdp1/options.py`` and ``checkpoint/state_dict_options.py``.
"""

from minifsdp.checkpoint.state_dict_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
