"""Saving and loading: state dicts of models and optimizers, for FSDP1 and FSDP2; attached from outside."""
