"""Frozen, shared, ignored and original parameters, and their names."""
