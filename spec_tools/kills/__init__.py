"""Kills a rank in the middle of a save, and checks that no checkpoint is lost."""
