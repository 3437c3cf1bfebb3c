"""Compares speed, memory and communication of minifsdp with torch's own trainers, in one run.

    python -m spec_tools.benchmarks

``--quick`` runs fewer rounds, ``--record`` writes the tables into ``docs/benchmarks.md``, and all other options are
passed to pytest. The benchmarks are not part of the test command, because times are not reproducible.

If two trainers are timed one after the other, the load of the machine can change in between. So all contenders of a
workload run in the same processes, one for each rank. A *round* is one step of each contender, and every round has a
new random order. Medians of different contenders are never compared. The comparison uses the ratios of steps in the
same round, and the median and the quartiles of these ratios::

                      round 1     round 2     round 3      median
    torch FSDP1       300 ms      310 ms      620 ms        310
    minifsdp          240 ms      251 ms      490 ms        251
    ratio             0.800       0.810       0.790         0.800   quartiles 0.795 and 0.805

In round 3 another program used the cores. The times changed, but the ratio did not. The distance of the quartiles shows
how much the load varied.

Before the timing, all contenders train three steps, and their losses are compared with those of one process on the
batches of all ranks. A wrong loss ends the run.

In addition, there are figures that hardly depend on the load of the machine: calls of Python functions for each unit,
bytes sent, and the largest number of bytes in live tensors.

Reading order: ``workloads`` (the models) -> ``contenders`` (the trainers) -> ``race`` (the timing) -> ``figures``
(other measurements) -> ``ranks`` (the processes) -> ``report`` (the table) -> ``page`` (the page, and the data of its
pictures) -> ``test_steps`` (the results in pytest-benchmark).
"""
