"""Compilers, fake tensors, and calls inside autograd modes."""
