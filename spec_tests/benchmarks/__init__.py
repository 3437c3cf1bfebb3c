"""How fast, how small, how much is sent: minifsdp beside torch's own trainers, in one run.

    python -m spec_tests.benchmarks

is the whole command; ``--quick`` takes fewer rounds, ``--record`` writes the tables into ``docs/benchmarks.md``, and
anything else is handed to pytest. It is no part of the test command, because a clock proves nothing.

Two trainers that are timed one after the other are timed on two machines: the one that was busy with something else at
ten o'clock and the one that was not at five past. So all contenders of a workload live in the same processes, one for
each rank, and a *round* is one step of each, in an order that is drawn anew for every round. What is compared is never
two medians but the ratio of two neighbours in the same round, and of these ratios the median and the quartiles::

                      round 1     round 2     round 3      median
    torch FSDP1       300 ms      310 ms      620 ms        310
    minifsdp          240 ms      251 ms      490 ms        251
    ratio             0.800       0.810       0.790         0.800   quartiles 0.795 and 0.805

In round 3 somebody else took the cores. Both medians moved, the ratio did not. How far the quartiles lie apart says how
much of that was going on.

Before any clock is started, all contenders train three steps and their losses are compared with those of one process on
the batches of all ranks. A fast wrong answer ends the run.

Beside the time stand figures that hardly depend on how busy the machine is: calls of Python functions for each unit,
bytes sent, and the largest number of bytes in live tensors.

Reading order: ``workloads`` (what is trained) -> ``contenders`` (by whom) -> ``race`` (how it is timed) -> ``figures``
(what else is measured) -> ``ranks`` (the processes) -> ``report`` (the table) -> ``page`` (the page, and what its
pictures are drawn from) -> ``test_steps`` (how it gets into pytest-benchmark).
"""
