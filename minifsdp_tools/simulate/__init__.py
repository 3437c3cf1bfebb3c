"""The step simulator, ``python -m minifsdp_tools.simulate``; see ``replay.py`` for how it works. Nothing imports it."""
