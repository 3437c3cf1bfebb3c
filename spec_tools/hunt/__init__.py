"""The long hunt: runs random cases with new seeds until the time is over.

The seeds of the test suite are fixed, so that a failing test points to a change. Such seeds find nothing new after the
first run. The hunt starts with a different seed each time::

    python -m spec_tools.hunt --minutes 30
    python -m spec_tools.hunt --minutes 30 --seed 17        the same cases in the same order
    python -m spec_tools.hunt --replay build/findings/runs-fsdp1-2916.json

It cycles through all kinds of random programs for both front ends: training runs, training runs that are saved and
resumed, combinations of options, calls in any order, and scenarios on the simulated accelerator. A failing case is
written to a file immediately, then reduced until no part can be removed, and written again. At the end the hunt prints
the number of cases it tried. Its exit status is 1 if it found anything.

* ``generators.py``: the functions that draw, try and reduce cases. All of them use JSON.
* ``scenarios.py``: runs scenarios in a process with a simulated accelerator.
* ``__main__.py``: the main loop, the files and the command.

Cost: a batch of a few dozen cases takes seconds. A case that hangs takes half a minute. On a very busy machine, ranks
may not rendezvous in that time, which causes a false finding. Its file then reports that it could not be reproduced.

Worker processes exit when the hunt has ended, for any reason, so none is left behind.
"""
