"""The long hunt: training runs that nobody has tried, until the minutes are over.

The suite's own seeds are fixed, so that a run tells what a change has broken. What they have not found, they will never
find. This hunt begins with another seed each time::

    python -m spec_tests.hunt --minutes 30
    python -m spec_tests.hunt --minutes 30 --seed 17        the same cases in the same order
    python -m spec_tests.hunt --replay build/findings/runs-fsdp1-2916.json

It goes round all that can draw cases, for both doors: training runs, training runs that are saved and resumed,
combinations of options, and scenarios on the simulated accelerator. A case that fails is written to a file at once,
then made smaller until nothing can be left out, and written again. At the end stands how many cases were tried. Returns
1 if anything was found.

* ``generators.py``: who draws cases, who tries them, who makes them smaller; all of them speak JSON.
* ``scenarios.py``: what a process with a simulated accelerator does for it.
* ``__main__.py``: the round, the files and the command.

Price: a batch of some tens of cases takes seconds. A case that hangs takes half a minute. On a machine so busy that
ranks cannot meet in that time, one may be found that is none; the file then says that it was not seen again.

Ranks end themselves when the hunt is gone, however it went, so none is left behind.
"""
