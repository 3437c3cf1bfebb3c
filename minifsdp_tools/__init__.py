"""Tools around minifsdp: what a job costs, pictures of recorded steps, a simulator of steps, and exercises.

``cost.py`` and ``timeline.py`` have the names that programs import. ``minifsdp.explain(model)`` is in ``explain.py``.
The commands are ``python -m minifsdp_tools.simulate`` and ``python -m minifsdp_tools.learn``. minifsdp needs none of
these modules to train.
"""
