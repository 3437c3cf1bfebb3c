"""Whole programs of users: they train like torch's FSDP or like one process, and no check ends, refuses or slows them.

* ``test_dropin.py`` runs the programs in ``dropin/``, which are written for torch. Only their import lines are changed.
* ``test_ordinary.py``, ``test_uneven.py`` and ``test_wrapped_differently.py`` have programs that do one thing which a
  check could take for an error. Each compares its parameters with plain training, and no message may report an error.

``spec_tools/processes`` has the programs that need their own processes. Every program also runs with torch's FSDP,
which shows that the program is healthy::

    python -m pytest -q spec_tests/healthy --engine torch
"""
