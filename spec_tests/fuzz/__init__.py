"""Sequences of calls that nobody has thought of, in right and in wrong order, compared with one process.

``spec_tests/properties`` draws models and trains each of them as one should. Here the model is small and what is drawn
is the *program*: what is called, when, with what, and on which rank. A state machine of hypothesis writes programs as
plain data; each is run on two ranks, through one of the doors, and beside it on a *twin*, the same model in one process
that computes the batches of both ranks. After every call it must be so:

* what the call gives, and what the parameters and gradients are, equals the twin's; or
* it has raised an error of minifsdp, whose text begins with ``rank N:``, and the model is what it was before; or
* the twin has raised an error of the same kind: a program that is wrong for any model.

Nothing else may happen: no bare ``AttributeError`` from inside the package, no hang, no other number. Each program ends
with one ordinary step, which must go well whatever came before it.

Worked example, a program of six calls::

    forward(batch=0)              equals the twin's output
    enter("summon")               full parameters equal the twin's
    forward(batch=1)              refused on both ranks
    leave()
    backward("last")              gradients equal the mean of the twin's
    save("SHARDED"), ...          each rank's rows equal the twin's

Programs in which some call is made by one rank only are kept apart, for what follows is often a time-out, which takes a
second. There an error that tells of it, or that only one of the ranks gets, ends the program. What may not happen is
that all ranks come to the end and the twin, which knows who has called what, would not have let them, or has other
parameters. What all ranks refuse alike ends nothing.

Units are of several kinds (``net.py``): a parameter can share its gradient's memory with the input, be used through
a view, or have another dtype. Hooks keep the gradients of each rank's input and of the tensors between blocks. After
every call they are compared with the gradients of the same batch in the plain model. So a later write is found.

* ``case.py``: a program as plain data.
* ``machine.py``: the state machine that draws them.
* ``known.py``: short programs, one for each kind of wrong number.
* ``net.py``: the model and its batches.
* ``twin.py``: one process.
* ``sides.py``, ``wrapped.py``, ``composed.py``: the sharded model, through either door; what each call does to it.
* ``wrong.py``: calls that are wrong by themselves: wrong types, wrong values.
* ``play.py``: what a rank does.
* ``judge.py``: sends programs to the ranks, and makes one that fails smaller.
* ``__main__.py``: ``python -m spec_tests.fuzz --number 2000 --seed 7 --output build/fuzz.json``.

Price: a program of fifteen calls takes about a tenth of a second on two ranks.
"""
