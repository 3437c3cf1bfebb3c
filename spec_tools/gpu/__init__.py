"""The kit for a machine with GPUs: one command that runs all checks there, and one report with the results.

    python -m spec_tools.gpu

This package was written without a GPU. A user with a GPU may have only ten minutes and does not want to learn how the
tests work. So the kit runs the cheap checks first, needs no attention, survives crashes of CUDA processes, and writes a
file that can be attached to an issue.

================  ===================================================================================================
stage             what it checks
================  ===================================================================================================
``hardware``      the versions, one line for each rank, the facts of the machine with warnings
``first_step``    do ``FullyShardedDataParallel`` and ``fully_shard`` train on all GPUs; the answer of the first minute
``links``         do two ranks receive what the other sends, for each pair
``collectives``   do all-gather, reduce-scatter and all-reduce work by themselves, without this package
``smoke``         do ``FullyShardedDataParallel`` and ``fully_shard`` train, and agree with a single process
``bandwidth``     how fast all-gather and reduce-scatter are by size, and whether all values are right
``steps``         do losses agree with torch's FSDPs, and time and memory of a training step of each
``suite``         the whole test suite with ``--device cuda``
``benchmarks``    ``python -m spec_tools.benchmarks``, which always runs on the CPU
``races``         do results stay equal bit by bit when streams are delayed at random
``control``       do failures occur again alone, and with torch's own FSDPs
================  ===================================================================================================

``hardware``, ``links``, ``collectives`` and ``smoke`` are layers: each uses what those before it have checked. If one
of them fails, the kit does not start the stages after it, because they would report the same failure. It prints what
the failure proves and does not prove, and the next commands.

A stage is a list of *chunks*. A chunk is a process and its child processes: one test file, or one configuration of the
race hunt. After an illegal memory access, a process cannot use the GPU any more, so the next chunk is a new process. If
a chunk exceeds its limit, the kit records the stacks of all its processes and ends them. After each chunk, the kit
writes the outcome to the disk, so that after an interruption the same command continues with the next chunk::

    smoke/1 passed, smoke/2 passed, suite/fsdp1/test_clip.py passed, ... Ctrl-C
    the same command again: begins with the chunk after the last one that is on the disk

A `Platform` defines which device to use and how to delay a stream. ``--device cpu`` runs all stages with gloo and with
delays that do nothing. This tests the kit but no GPU, and the report begins with this warning.

Reading order: ``platforms`` -> ``chunks`` (a process and how it ends), ``evidence`` (files about a failure),
``names`` (no names in reports) -> ``progress`` (the outcomes on the disk) -> ``stages`` (the chunks of each stage)
-> ``piece`` and ``on_ranks`` (chunks that do not run pytest) -> ``hardware`` with ``first`` (ranks), ``machine`` and
``nvidia_smi`` (facts), ``remarks`` (warnings) -> ``links``, ``collectives``, ``smoke``, ``bandwidth``, ``steps``,
``races`` -> ``cards`` (peaks) and ``intervals`` -> ``note`` (findings of a pytest chunk) -> ``control`` (failures
again) -> ``advice`` (what a failure means) -> ``bandwidth_table``, ``steps_table``, ``plots`` -> ``beside`` ->
``summary``, ``text``, ``report`` -> ``__main__``. ``nodes``, ``node_stages`` and ``merging`` run on several
machines.

Spec: KIT-01 to KIT-25.
"""
