"""Front door 1: ``FullyShardedDataParallel``, a wrapper with one flat parameter in each unit."""
