"""Breaks the package on purpose, one behavior at a time, and checks which requirements fail.

If the package violates a requirement and its tests still pass, these tests are worthless. So this folder has a
catalogue of *mutants*. Each mutant has a passage of code with its replacement, a sentence about the broken behavior,
and the requirements whose tests must fail::

    Mutant("hybrid-divides-by-the-shards-only",
           "ReducePlan.mean",                    the function, in any file
           "mesh.num_ranks", "mesh.num_shards",  the passage, which occurs once in it, and its replacement
           "The mean is taken over the shard group and forgets the replicas.",
           "HYB-05")

On two ranks this mutant changes nothing, because ``num_ranks`` and ``num_shards`` are equal. On four ranks as 2 x 2,
gradients are twice as large as they should be, and the test of HYB-05 fails. If the tests of HYB-05 used only two
ranks, they would pass, and the report would list the mutant as not detected.

Files: ``mutant.py`` finds the passage, ``catalogue/`` has the mutants by sections of the spec, ``watch.py`` makes
pytest run only the tests of some requirements, ``runner.py`` runs one mutant in a copy of the repository with
``server.py``, and ``record.py`` writes ``docs/data/mutants.json``. A mutant names a function, so that code can move to
other files and lines. ``test_mutants.py`` runs no mutants, but fails if one no longer applies.

Cost: one pytest run for each mutant. torch is imported once for all of them (``server.py``), so a mutant costs the
import of a few test files and these tests: 10 to 60 seconds on two cores that had other work as well. Only tests with
one of the mutant's requirements run, and a test is skipped once each of its requirements has failed.

Tools such as mutmut and cosmic-ray replace tokens, such as ``<`` by ``<=`` or a number by its successor, and so find
untested lines. They cannot express that only hybrid sharding omits the division, or which requirement must detect it.

*In torch:* there is no equivalent; torch does not measure its tests by the defects that they miss.

Usage::

    python -m spec_tests.mutants                    all; continues an interrupted run
    python -m spec_tests.mutants HYB- div           those whose name or requirements contain one of these texts
    python -m spec_tests.mutants --sample 20        some of those that were detected when the record was written
"""
