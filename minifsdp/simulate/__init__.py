"""The step simulator, ``python -m minifsdp.simulate``; see ``replay.py`` for how it works. Nothing imports it."""
