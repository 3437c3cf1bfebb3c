"""Observers that are off by default: the checks of ``minifsdp.debug()``, which cost time, and the event recorder."""
