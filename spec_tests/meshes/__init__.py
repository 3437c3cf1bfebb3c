"""Hybrid sharding, device meshes, and tensor parallelism."""
