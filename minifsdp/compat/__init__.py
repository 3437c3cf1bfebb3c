"""Deprecated names, and names that PyTorch and frameworks look for, added to both APIs."""
