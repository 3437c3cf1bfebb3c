"""API 1: ``FullyShardedDataParallel``, a wrapper with one flat parameter for each unit."""
