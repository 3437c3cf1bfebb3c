"""minifsdp: the FSDP that a person can read in a weekend, trust line by line, and run."""

from minifsdp.fsdp1.grad_scaler import ShardedGradScaler
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp1.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardedGradScaler",
    "ShardingStrategy",
]
__version__ = "0.1.0"
