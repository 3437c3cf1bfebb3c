"""minifsdp: the FSDP that a person can read in a weekend, trust line by line, and run.

    from minifsdp import FullyShardedDataParallel as FSDP

The names, arguments and results are those of ``torch.distributed.fsdp``. To read the package, begin with the essay at
the head of ``engine/layout.py`` and go on in the order that ``engine/__init__.py`` gives.
"""

from minifsdp.fsdp1.grad_scaler import ShardedGradScaler
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp1.state_dict_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from minifsdp.fsdp1.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
__version__ = "0.1.0"
