"""Unsharded parameters outside of a step: ``summon_full_params``, ``apply``, and ``unshard``."""
