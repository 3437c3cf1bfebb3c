"""Random training runs, compared with a single process.

A hand-written test covers only cases that its author thought of. Here a generator draws whole training runs: a tree of
modules, which of them are units, a strategy, precision, prefetching, micro-batches with and without synchronization.
Each run is trained on some ranks and also unsharded in one process, and the results must agree.

* ``description.py``: one training run as plain data. It can be printed, sent to a rank and typed on a command line.
* ``draw.py``: draws random descriptions.
* ``build.py``: builds a model from a description, and shards it with one of several *front ends* (``api``).
* ``oracle.py``: the reference: the same run in one process.
* ``saving.py``: saves model and optimizer, and loads them into others.
* ``run.py``: the program of a rank: trains, compares, saves and resumes each description.
* ``hunt.py``: sends batches of descriptions to the ranks, and reduces a failing one until no part can be removed.
* ``replay.py``: ``python -m spec_tests.properties.replay '<json>'`` runs one description again.

A failure ends with such a command line, which can be pasted into a shell.

Two environment variables set the number of runs and the seed::

    MINIFSDP_PROPERTY_EXAMPLES=3000 MINIFSDP_PROPERTY_SEED=17 python -m pytest -s spec_tests/fsdp1/test_properties.py

By default, some hundred runs are drawn, always the same ones. ``spec_tests/combinations`` draws a table of options
instead of models, and ``python -m spec_tests.hunt --minutes 30`` runs new seeds (``spec_tests/hunt``).
"""
