"""The healthy programs, by kind.

``support.py`` chooses the implementation and contains shared functions. The functions of ``uneven.py``, ``names.py``
and ``ordinary.py`` run on the ranks of the harness.
"""
