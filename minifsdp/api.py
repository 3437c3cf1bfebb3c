"""User options at the same import path as in torch: ``from minifsdp.api import ShardingStrategy``.

The classes are documented in ``fsdp1/options.py`` and ``checkpoint/state_dict_options.py``.
"""

# `__all__` below lists the exported names.
# ruff: noqa: F403, F405

from minifsdp.checkpoint.state_dict_options import *
from minifsdp.fsdp1.options import *

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
