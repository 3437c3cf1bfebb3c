"""A long training run in which the process must not grow.

If a step leaks even a hundred bytes, the job fails after a week. This test trains a tiny version of the tutorial's GPT
for some thousand steps on two ranks. It also evaluates, and saves and loads full and sharded checkpoints of the model
and the optimizer. The objects of the process are counted at the end of each round::

    step    tensors   their bytes   descriptors   threads   our objects   in queues   Python's bytes   resident
      500       214       381,532            41        14           198           0          912,344     412 MB
    2,000       214       381,532            41        14           198           0          912,608     412 MB

A count must not be larger at the end than after the warm-up. A size in bytes can be slightly larger, because allocators
and caches round.

* ``watch.py``: the counts, and their comparison.
* ``job.py``: the run on the ranks, and the leaks that tests insert into it.
* ``__main__.py``: ``python -m spec_tools.soak``, 2,000 steps with each API. ``--record`` writes the counts for the
  documentation.

Cost: a step takes some milliseconds, so 2,000 take about a minute with each API.
"""
