"""Random sequences of calls, in correct and in wrong order, compared with one process.

``spec_tests/properties`` draws models and trains each of them correctly. Here the model is small, and the *program* is
drawn: which calls it makes, when, with which arguments, and on which rank. A hypothesis state machine writes programs
as plain data. Each runs on two ranks with one of the APIs, and also on the *reference model*, the same model in one
process that computes the batches of both ranks. After every call, one of these must be true:

* the result of the call, the parameters and the gradients are equal to those of the reference model; or
* the call has raised an error of minifsdp, whose text begins with ``rank N:``, and the model has not changed; or
* the reference model has raised an error of the same kind, so the program is wrong for any model.

Everything else is a finding: a bare ``AttributeError`` from inside the package, a hang, a different number. Each
program ends with one ordinary step, which must succeed after any other calls.

Worked example, a program of six calls::

    forward(batch=0)              equals the reference model's output
    enter("summon")               full parameters equal the reference model's
    forward(batch=1)              refused on both ranks
    leave()
    backward("last")              gradients equal the mean of the reference model's
    save("SHARDED"), ...          each rank's rows equal the reference model's

Programs in which only one rank makes some call run separately, because they often end in a time-out, which takes a
second. In such a program, an error that reports the difference, or that only one rank gets, ends the program. If all
ranks reach the end although their calls do not match in the reference model, this is a finding. Different parameters
are a finding, too. An error on all ranks does not end the program.

Units are of several kinds (``net.py``): a parameter can share its gradient's memory with the input, be used through
a view, or have another dtype. Hooks keep the gradients of each rank's input and of the tensors between blocks. After
every call they are compared with the gradients of the same batch in the plain model. So a later write is found.

* ``case.py``: a program as plain data.
* ``machine.py``: the state machine that draws them.
* ``known.py``: short programs, one for each kind of wrong number.
* ``net.py``: the model and its batches.
* ``twin.py``: the reference model, in one process.
* ``sides.py``, ``wrapped.py``, ``composed.py``: the sharded model with either API, and the effect of each call on it.
* ``wrong.py``: calls that are wrong by themselves: wrong types, wrong values.
* ``play.py``: runs programs on a rank.
* ``judge.py``: sends programs to the ranks, and shrinks a failing one.
* ``__main__.py``: ``python -m spec_tests.fuzz --number 2000 --seed 7 --output build/fuzz.json``.

Cost: a program of fifteen calls takes about a tenth of a second on two ranks.
"""
