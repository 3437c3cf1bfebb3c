"""Training runs that nobody has thought of, compared with one process.

A test that a person writes holds what that person was afraid of. Here a generator draws whole training runs: a tree of
modules, who of them is a unit, a strategy, precision, prefetching, micro-batches with and without synchronisation. Each
is trained on some ranks and, unsharded, in one process, and the two must agree.

* ``description.py``: one training run as plain data. It can be printed, sent to a rank and typed on a command line.
* ``draw.py``: where descriptions come from.
* ``build.py``: from a description to a model, and from a plain model to a sharded one, by one of several *doors*.
* ``oracle.py``: the same run in one process.
* ``saving.py``: saving model and optimizer, and loading them into others.
* ``run.py``: what a rank does: train, compare, save and resume, next.
* ``hunt.py``: hands batches of descriptions to the ranks; if one fails, makes it smaller until nothing can be left out.
* ``replay.py``: ``python -m spec_tests.properties.replay '<json>'`` runs one again.

A failure ends in such a line, to be pasted into a shell.

How many, and which? Two variables of the environment say so::

    MINIFSDP_PROPERTY_EXAMPLES=3000 MINIFSDP_PROPERTY_SEED=17 python -m pytest -s spec_tests/fsdp1/test_properties.py

Without them it is some hundreds, always the same. ``spec_tests/combinations`` draws a table of options instead of
models, and ``python -m spec_tests.hunt --minutes 30`` goes on with seeds that nobody has tried (``spec_tests/hunt``).
"""
