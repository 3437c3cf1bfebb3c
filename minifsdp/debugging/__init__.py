"""Optional checks that cost time, off by default: ``minifsdp.debug()``."""
