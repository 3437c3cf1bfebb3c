"""How parameters are divided into units and shards."""
