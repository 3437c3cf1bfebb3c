"""Gradient accumulation: ``no_sync`` and the setters of ``fully_shard``."""
