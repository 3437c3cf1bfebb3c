"""A long training run in which nothing may grow.

What is kept for each step, be it a hundred bytes, ends a job after a week. So the tutorial's GPT, tiny, is trained for
some thousand steps on two ranks, with evaluations and with checkpoints of model and optimizer, whole and in rows, saved
to the disk and loaded again. All the while it is counted what the process holds, always at the same place of a round::

    step    tensors   their bytes   descriptors   threads   our objects   in queues   Python's bytes   resident
      500       214       381,532            41        14           198           0          912,344     412 MB
    2,000       214       381,532            41        14           198           0          912,608     412 MB

What is counted must not be more at the end than after the warm-up; what is measured in bytes may be a little more,
because allocators and caches round.

* ``watch.py``: what is counted, and what has grown.
* ``job.py``: the run on the ranks, and leaks that can be planted in it.
* ``__main__.py``: ``python -m spec_tests.soak``, 2,000 steps through each door; with ``--record`` the documentation
  keeps what was counted.

Price: a step takes some milliseconds, so 2,000 take about a minute through each door.
"""
