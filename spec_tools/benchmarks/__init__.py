"""Compares speed, memory and communication of minifsdp with torch's own trainers.

    python -m spec_tools.benchmarks

pytest-benchmark times the steps and stores the results. ``--quick`` times fewer steps, ``--record`` writes the results
into ``docs``, and all other options are passed to pytest: ``-k tiny`` measures one workload, and ``-k step`` no checks
and no optimizers. The benchmarks are not part of the test command, because times are not reproducible.

A benchmark runs on two or four ranks. Rank 0 is the process of pytest, and the other ranks are started for each
benchmark. All ranks run the same function. Rank 0 gets a timer that measures with ``benchmark.pedantic``, and the other
ranks get one that only runs the action as often. There is a barrier before each timed action.

Before the timing, a contender trains three steps, and its losses are compared with those of one process on the batches
of all ranks. A wrong loss ends the benchmark. After the timing, other figures are measured that hardly depend on the
load of the machine: calls of Python functions, bytes sent, and the largest number of bytes in live tensors.

Reading order: ``workloads`` (the models) -> ``contenders`` (the trainers) -> ``conftest`` (the ranks) -> ``steps``,
``checks`` and ``optimizers`` (what the ranks do) -> ``test_benchmarks`` (the benchmarks) -> ``page`` (the report).
``growth`` is separate: it counts on one rank how costs grow with the model.
"""
