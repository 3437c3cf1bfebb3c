"""The kit for a machine with GPUs: one command that tries everything there, and one report that says how it went.

    python -m spec_tests.gpu

Whoever wrote this package had no GPU. Whoever has one may have ten minutes and no wish to learn how the tests are
built. So the kit asks the cheap questions first, needs no attention, survives what CUDA does to a process, and ends in
a file that can be attached to an issue.

================  ===================================================================================================
stage             what it asks
================  ===================================================================================================
``hardware``      which GPUs, how much free memory, which versions of Python, torch, CUDA, NCCL and the driver
``collectives``   do all-gather, reduce-scatter and all-reduce work by themselves, without this package
``smoke``         do ``FullyShardedDataParallel`` and ``fully_shard`` train, and agree with a single process
``suite``         the whole test suite with ``--device cuda``
``benchmarks``    ``python -m spec_tests.benchmarks``, which runs on the CPU, whatever the device is
``races``         do the bits stay the same when streams are delayed at random
================  ===================================================================================================

The first three are meant to take a minute. When one of them fails the rest is not started: it could only repeat the
news.

A stage is a list of *chunks*. A chunk is a process with everything that it starts: one test file, or one configuration
of the race hunt. An illegal memory access takes its process down and leaves the GPU unusable for it; the next chunk is
a new process. A chunk that takes longer than its limit is asked for the stacks of all its processes, and ended. After
each chunk its outcome is written to the disk, so the same command goes on where the last one was stopped, whoever
stopped it::

    smoke/1 passed, smoke/2 passed, suite/fsdp1/test_clip.py passed, ... Ctrl-C
    the same command again: begins with the chunk after the last one that is on the disk

Everything asks a `Platform` which device to use and how to delay a stream. ``--device cpu`` runs all of it with gloo
and with delays that do nothing. That tries the kit and says nothing about a GPU, and the report begins with this
sentence.

Reading order: ``platforms`` -> ``chunks`` (a process and its end) -> ``progress`` (what is on the disk) -> ``stages``
(which chunks) -> ``piece`` and ``on_ranks`` (what a chunk of our own runs) -> ``hardware``, ``collectives``,
``smoke``, ``races`` -> ``note`` (what a chunk of pytest leaves behind) -> ``report`` -> ``__main__``.

Spec: KIT-01 to KIT-08.
"""
