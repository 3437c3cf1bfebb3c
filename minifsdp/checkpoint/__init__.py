"""Saves and loads the state dicts of models and optimizers, for FSDP1 and FSDP2. The engine does not import it."""
