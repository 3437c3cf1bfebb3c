"""The special cases of ``minifsdp/cases``."""
