"""API 2: ``fully_shard``, which shards a model in place and each parameter separately."""
