"""Breaks the package on purpose, one behavior at a time, and shows which tests notice.

If the package violates a requirement and its tests still pass, these tests are worthless. So ``catalogue/`` has
*breaks*: texts of the package, their replacements, and what must notice the difference::

    [hybrid-divides-by-the-shards-only]
    rows = ["HYB-05", "SHARD-12"]
    what = "The mean divides by the size of the shard group only and omits the replicas."
    place = "ReducePlan.mean"
    old = "mesh.num_ranks"
    new = "mesh.num_shards"

On two ranks this break changes nothing, because ``num_ranks`` and ``num_shards`` are equal. On four ranks as 2 x 2,
gradients are twice as large as they should be, and the test of HYB-05 fails. If the tests of HYB-05 used only two
ranks, they would pass, and the report would list the break as not noticed.

There are two kinds:

* The tests of the requirements ``rows`` must fail. pytest runs them on a copy of the repository, on the CPU or on the
  simulated accelerator. These breaks are also called *mutants*. Each of them guards an idea of its own, and they are
  spread over all modules of the package in proportion to their size.
* A ``program`` of ``spec_tests/streams/programs.py`` must notice. It runs on the simulated accelerator. These breaks
  remove or move each wait, hold, ``record_stream``, copy and stream of the package. If a race checker reports nothing,
  it can be correct or defective; they show which.

====================  ==========================================================================================
``by``                how a program notices
====================  ==========================================================================================
``collision``         the race checker reports a race
``exception``         the program does not finish
``wrong values``      the results differ from those of the intact engine, even in the order of the program
``stops``             correct values, but the CPU is stopped more often or less often
``peak``              correct values, but more memory
``overlap``           correct values, but fewer collectives may overlap computations
====================  ==========================================================================================

If no test notices a break, a test is missing, the checker has a defect, or the line is not necessary.

A third kind is not in the catalogue. ``without-CASE`` removes a case of ``minifsdp/cases`` from its list. Then the
tests of its requirements must fail, and no other test of the same files. ``cases.py`` makes these breaks.

To add a break, add it to a file of ``catalogue/``, and run it with ``--record``. If a refactoring changes the text of a
break, ``test_catalogue.py`` fails. Then change the break so that it breaks the same behavior.

Files: ``edits.py`` reads the catalogue and applies a break, ``runner.py`` runs the tests or the program, with the
pytest plugin ``watch.py``, ``record.py`` writes ``docs/data/mutants.json`` and ``docs/data/stream-breaks.json``, and
``counterfactuals.py`` records what some breaks do to a step, for the documentation.

Cost: 15 to 70 seconds for the tests of a requirement, and two seconds for a program, on two cores that had other work
as well.

Tools such as mutmut and cosmic-ray replace tokens, such as ``<`` by ``<=`` or a number by its successor, and so find
untested lines. They cannot express that only hybrid sharding omits the division, or which requirement must notice it.

*In torch:* there is no equivalent; torch does not measure its tests by the defects that they miss.

Usage::

    python -m spec_tools.breaks                           all of the catalogue
    python -m spec_tools.breaks HYB- div --record         those whose name or requirements contain one of these texts
    python -m spec_tools.breaks --device cpu --sample 20  some of those for the CPU
    python -m spec_tools.breaks without-side_outputs      without a case

Spec: SIM-07.
"""
