"""One command that checks minifsdp on a machine with GPUs in the time that it gets, and writes one report.

    python -m spec_tools.gpu --minutes 12

================  ========  ========================================================================================
stage             twelfths  what it checks
================  ========  ========================================================================================
``hardware``           0.5  which devices and versions there are, and how long processes and ranks take to start
``collectives``       0.25  are the values of all-gather and reduce-scatter right, and how fast are they by size
``smoke``             0.25  does each kind of step agree with a single process and with torch, on 1, 2 and 4 ranks
``unexplained``          1  tests that failed on a GPU without a known cause, with all of their output
``requirements``         6  one test for each requirement that no GPU has shown yet
``steps``                2  time, memory and exposed communication of a training step beside torch's FSDPs
``races``                1  do results stay equal bit by bit when streams are delayed at random
``variants``             1  the other tests of the spec, and other variants of the same tests
================  ========  ========================================================================================

A stage that ends early gives its time to the next ones. Stages that were not complete continue before
``variants``. All stages consist of tests of pytest, and run in one process with one pool of ranks for each number of
ranks, because the start of CUDA and NCCL takes longer than most tests.

After an illegal memory access, a process cannot use the GPU any more. So if the process crashes or hangs, a new one
continues with the next test. Each result is a line of the *journal* as soon as it is known. A run that is cut off loses
only the test that was running, and the same command continues::

    hardware passed, requirements 1 to 180 passed, 181 ... the machine is taken away
    the same command again: 182, ..., the last requirement, 181, steps, races, variants

On one machine the command starts all ranks itself, one for each GPU. Under ``torchrun``, rank 0 does this, and the
other ranks exit. If there are fewer GPUs than ranks, the ranks share the first GPU; then no time has a meaning.

``--device cpu`` and ``--device simulated`` run the same stages without a GPU. This tests the command, and its report
begins with a note about it.

Reading order: ``__main__`` -> ``stages`` (the table of stages) -> ``suite`` (the loop in the process of pytest) and
``plugin`` -> ``cover`` (the order of the tests) -> ``journal`` and ``process`` (how a process ends) -> ``tasks`` ->
``hardware``, ``collectives``, ``steps``, ``races`` -> ``code``, ``report`` and ``plan``.
"""

import time

BEGIN = time.time()
