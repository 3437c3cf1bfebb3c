"""Front door 2: ``fully_shard``, which shards a model in place and keeps its parameters apart."""
