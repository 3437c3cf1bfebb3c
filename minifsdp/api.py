"""What the user may choose, under the name that it has in torch: ``from minifsdp.api import ShardingStrategy``.

The classes, and what there is to read about them, are in ``fsdp1/options.py`` and ``checkpoint/state_dict_options.py``.
"""

# What is offered is named once, below.
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
