"""Random sequences of calls, in correct and in wrong order, compared with one process.

Other random programs train models correctly. Here the model is small, and the *calls* are drawn: which ones, when,
with which arguments, and on which rank (``calls`` and ``apart`` of ``spec_tests/random_programs``). Everything that is
neither equal to the reference nor an error of minifsdp is a finding: a bare ``AttributeError`` from inside the package,
a hang, a different number. Each program ends with one ordinary step, which must succeed after any other calls.

Worked example, a program of six calls::

    forward(batch=0)              equals the reference's output
    enter("summon")               full parameters equal the reference's
    forward(batch=1)              refused on both ranks
    leave()
    backward("last")              gradients equal the mean of the reference's
    save("sharded"), ...          each rank's rows equal the reference's

Programs in which only one rank makes some call run separately, because they often end in a time-out, which takes a
second. In such a program, an error that reports the difference, or that only one rank gets, ends the program. If all
ranks reach the end although their calls do not match in the reference, this is a finding. Different parameters are a
finding, too. An error on all ranks does not end the program.

* ``known.py``: short programs, one for each kind of wrong number.
* ``__main__.py``: ``python -m spec_tools.fuzz --number 2000 --seed 7 --output build/fuzz.json``.

Cost: a program of fifteen calls takes about a tenth of a second on two ranks.
"""
