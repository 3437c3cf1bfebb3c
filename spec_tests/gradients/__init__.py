"""Gradients: hooks, shared gradients, and custom autograd functions."""
