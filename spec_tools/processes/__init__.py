"""Starts ranks, breaks one of them, and watches what the job does.

* ``ranks.py`` starts a program on some ranks and waits for them; ``faults.py`` has the faults of a rank.
* ``deviate.py``: one rank does something else, ends or fails; or ranks catch errors and start again.
* ``stages.py`` and ``matrix.py``: each fault at each stage of a training.
* ``train.py``: the tutorial's training, with faults at events of a step or of a save. ``kills.py`` kills a rank in a
  save, or lets torchrun restart the job.
* ``soak.py``: a long run in which the process must not grow.
* ``machines.py`` and ``machine_training.py``: two machines on one computer, with a link that can be cut.
* ``checkpoint_sizes.py`` has formulas for sharded checkpoints on any number of ranks.
* ``healthy.py``: programs without a fault, which no check may end.

``python -m pytest spec_tools/processes`` runs some cases of the matrix, of the kills and of the restarts, other ones on
the next day. With the name of a test file, it runs all of them.
"""
