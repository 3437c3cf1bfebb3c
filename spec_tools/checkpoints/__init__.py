"""Sharded checkpoints on growing numbers of ranks: formulas for bytes, memory and files, and a measurement of them."""
