"""Breaks the package on purpose, one behavior at a time, and checks which requirements fail.

If the package violates a requirement and its tests still pass, these tests are worthless. So this folder has a
catalogue of *mutants*. Each mutant has the requirements whose tests must fail, a sentence about the broken behavior,
and an edit of the syntax tree of one function::

    Mutant(
        "hybrid-divides-by-the-shards-only",
        "HYB-05 SHARD-12",
        "The mean divides by the size of the shard group only and omits the replicas.",
        replace("ReducePlan.mean", "$mesh.num_ranks", "$mesh.num_shards"),
    )

The edit names the function, in any file. ``$mesh`` is a placeholder for any expression, so a change of format, of
comments or of local names does not affect the edit. ``spec_tests/harness/edit.py`` has the rules of patterns.

On two ranks this mutant changes nothing, because ``num_ranks`` and ``num_shards`` are equal. On four ranks as 2 x 2,
gradients are twice as large as they should be, and the test of HYB-05 fails. If the tests of HYB-05 used only two
ranks, they would pass, and the report would list the mutant as not detected.

Each mutant guards an idea of its own, and the catalogue is spread over all modules of the package in proportion to
their size.

Files: ``mutant.py`` defines a mutant, ``catalogue/`` has the mutants by folders of the package, ``watch.py`` makes
pytest run only the tests of some requirements, ``runner.py`` runs one mutant in a copy of the repository with
``server.py``, and ``record.py`` writes ``docs/data/mutants.json``. ``test_mutants.py`` runs no mutants, but fails if
one no longer applies.

Cost: one pytest run for each mutant. torch is imported once for all of them (``server.py``), so a mutant costs the
import of a few test files and these tests: 10 to 60 seconds on two cores that had other work as well. Only tests with
one of the mutant's requirements run, and a test is skipped once each of its requirements has failed.

Tools such as mutmut and cosmic-ray replace tokens, such as ``<`` by ``<=`` or a number by its successor, and so find
untested lines. They cannot express that only hybrid sharding omits the division, or which requirement must detect it.

*In torch:* there is no equivalent; torch does not measure its tests by the defects that they miss.

Usage::

    python -m spec_tools.mutants                    all; continues an interrupted run
    python -m spec_tools.mutants HYB- div           those whose name or requirements contain one of these texts
    python -m spec_tools.mutants --sample 20        some of those that were detected when the record was written
"""
