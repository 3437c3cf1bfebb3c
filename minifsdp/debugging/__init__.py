"""Checks that cost something, off by default: ``minifsdp.debug()``."""
