"""Breaks the package on purpose, one meaning at a time, and looks which rows of the spec turn red.

A row that stays green while the package does the opposite of what the row says proves nothing. So here is a catalogue
of *mutants*, each a sentence about a behaviour that is gone, the passage that takes it away, and the rows that must
notice::

    Mutant("hybrid-divides-by-the-shards-only",
           "ReducePlan.mean",                    the function, wherever it stands
           "mesh.num_ranks", "mesh.num_shards",  the passage, once in it, and what stands there instead
           "The mean is taken over the shard group and forgets the replicas.",
           "HYB-05")

On two ranks nothing changes by this one, for there ``num_ranks`` and ``num_shards`` are the same; on four ranks as
2 x 2, gradients are twice what they should be, and the test of HYB-05 fails. A test of HYB-05 that had only two ranks
would pass, and the mutant would be reported as not noticed.

Files: ``mutant.py`` finds the passage, ``catalogue/`` has the mutants by sections of the spec, ``watch.py`` lets pytest
run the tests of some rows only, ``runner.py`` runs one mutant in a copy of the repository with the help of
``server.py``, ``record.py`` writes ``docs/data/mutants.json``. A mutant is named by function and meaning: code may move
to other files and lines. One that does not apply any more is an error of ``test_mutants.py``, which runs no mutant.

Price: one pytest for each mutant. torch is imported once for all of them (``server.py``), so that a mutant costs the
import of a few files of tests and those tests; 10 to 60 seconds were measured, on two cores that had other work as
well. Only tests that carry one of the mutant's rows are run, and no more of them once each row is red.

Tools such as mutmut and cosmic-ray exchange tokens, a ``<`` for a ``<=`` or a number for its successor, and so find
untested lines. They cannot say that the division is forgotten in hybrid sharding alone, nor which row of the spec would
have to notice.

*In torch:* nothing of the kind; its tests are not measured by what they fail to notice.

Usage::

    python -m spec_tests.mutants                    all; goes on where it was stopped
    python -m spec_tests.mutants HYB- div           those with one of these in their name or rows
    python -m spec_tests.mutants --sample 20        some of those that were noticed when the record was written
"""
