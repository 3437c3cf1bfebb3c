"""Tensor classes with methods for the all-gather."""
