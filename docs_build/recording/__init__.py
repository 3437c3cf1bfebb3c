"""Runs of trainings, tutorials and tests, and their records in ``docs/data``."""
