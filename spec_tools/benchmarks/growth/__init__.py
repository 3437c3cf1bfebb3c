"""How the cost of an FSDP grows with the number of units, ranks, and parameters in a unit, and a model of 7 billion.

    python -m spec_tools.benchmarks.growth

The command measures all parts and prints tables. ``--only units,large`` measures some of them, and ``--record`` writes
``docs/data/growth.json``, the source of the plots in ``docs/benchmarks.md``. Times need an idle machine. Calls do not:
``--calls`` measures only the calls, for example after a change of the engine.

The process group is torch's *fake* one, a world of up to 1024 ranks in which only rank 0 exists and nothing is sent.
So the measured step only contains the work of the library, which is the part that can grow. Worked example, Python
calls in a step of a library that does some work for the whole model and some for each unit::

    units                     12      48     192
    calls above the plain   1198    4726   18838      some for the whole step, the rest for each unit
    for each unit           99.8    98.5    98.1      falls to a limit; it would rise if each unit visited all units

A new process measures each point, so that earlier points have no influence. It is forked from a process that has only
imported torch and minifsdp.

Reading order: ``points`` (what is varied) -> ``measure`` (one point) -> ``llama`` (the large model) -> ``__main__``
(all of them, and the record).
"""
