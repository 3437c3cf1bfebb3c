"""One command that checks minifsdp on a machine with GPUs, and writes one report.

    python -m spec_tools.gpu

================  ===================================================================================================
stage             what it checks
================  ===================================================================================================
``hardware``      which devices and versions there are
``smoke``         does each kind of step agree with a single process and with torch, on 1, 2 and 4 ranks
``collectives``   are the values of all-gather and reduce-scatter right, and how fast are they by size
``steps``         time and memory of a training step beside torch's FSDPs, and do the losses agree
``races``         do results stay equal bit by bit when streams are delayed at random
``suite``         the tests of the spec with ``--device cuda``: first those that need a GPU, then those about streams
================  ===================================================================================================

The stages are in the order of their cost, so that a session of fifteen minutes on one GPU answers the first questions.

A stage consists of *jobs*. A job is a process with a time limit, and it starts the ranks as its children. After an
illegal memory access a process cannot use the GPU any more, so the next job is a new process. A job that fails or
exceeds its limit does not stop the others. After each job the command writes the report, so that a session that is cut
off loses nothing, and the same command continues with the next job::

    smoke/all passed, collectives/2-ranks failed, steps/1-ranks passed, ... the machine is taken away
    the same command again: begins with the job after the last one that is in the report

On one machine the command starts all ranks itself, one for each GPU. Under ``torchrun``, rank 0 does this, and the
other ranks exit. If there are fewer GPUs than ranks, the ranks share the first GPU; then no time has a meaning.

``--device cpu`` and ``--device simulated`` run the same stages without a GPU. This tests the command, and its report
begins with a note about it.

Reading order: ``__main__`` -> ``stages`` (the table of stages and their jobs) -> ``process`` (a job and how it ends)
-> ``job`` (the program of a job, and its ranks) -> ``hardware``, ``collectives``, ``steps``, ``races`` -> ``note`` (a
test file) -> ``report``.
"""
