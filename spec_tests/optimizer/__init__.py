"""Optimizer steps on sharded parameters."""
