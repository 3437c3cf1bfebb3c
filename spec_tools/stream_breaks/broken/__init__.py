"""Broken engines as data: all-gathers, reductions, memory, and the CPU."""
