"""What an FSDP costs as the work grows: more units, more ranks, more parameters in a unit, a model of 7 billion.

    python -m spec_tests.benchmarks.growth

measures all of it and prints tables; ``--only units,large`` takes some of the parts, and ``--record`` writes
``docs/data/growth.json``, from which the plots of ``docs/benchmarks.md`` are drawn. Times want a quiet machine. Calls
do not: ``--calls`` takes only these anew, when the engine has changed.

The process group is torch's *fake* one: a world of 1024 ranks in which only rank 0 exists and nothing is sent. So what
is left of a step is what the library itself does, and that is what may grow. Worked example, calls of Python functions
in a step of a library that does something for the whole model and something for each unit::

    units                     12      48     192
    calls above the plain   1198    4726   18838      some for the whole step, the rest for each unit
    for each unit           99.8    98.5    98.1      falls to a limit; one that rises looks at all units in each

A fresh process measures each point, so that nothing is left of the point before. It is a copy of one that has imported
torch and minifsdp, and done nothing else.

Reading order: ``points`` (what is varied) -> ``measure`` (one point) -> ``llama`` (the large model) -> ``__main__``
(all of them, and the record).
"""
