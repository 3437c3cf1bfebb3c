"""Saving and loading: state dicts of models and optimizers, attached to both doors from outside."""
