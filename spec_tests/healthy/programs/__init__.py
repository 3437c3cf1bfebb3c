"""The healthy programs, by kind.

``support.py`` chooses the implementation and contains shared functions. The functions of ``uneven.py``, ``names.py``,
``ordinary.py`` and ``groups.py`` run on the ranks of the harness. Those of ``lives.py``, ``late.py``, ``handlers.py``,
``children.py`` and ``ends.py`` run in their own processes.
"""
