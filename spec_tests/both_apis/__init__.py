"""Tests of behaviour that `FullyShardedDataParallel` and `fully_shard` have in common; see ``models/apis.py``."""
