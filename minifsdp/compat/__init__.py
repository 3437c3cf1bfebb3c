"""Older spellings, and names that PyTorch and frameworks look for, attached to both doors from outside."""
