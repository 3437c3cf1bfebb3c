"""Broken engines, as data: on the way of the parameters, of the gradients, in memory, and beside the CPU."""
