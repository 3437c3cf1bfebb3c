"""Healthy programs: no check may end, refuse or slow them, and no message may report an error in them.

Each program is one function of ``programs/``. It trains a small model on two or four ranks, does one thing that real
programs do and that a check could take for an error, and compares the parameters with plain training.

`test_on_the_pool.py` runs programs that can share a process, on the ranks of the harness. ``spec_tools/processes`` has
the programs that need their own processes.

Every program also runs with torch's FSDP, which shows that the program is healthy::

    HEALTHY_IMPL=torch python -m pytest -q spec_tests/healthy spec_tools/processes
"""
