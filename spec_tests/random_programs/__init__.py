"""Random programs that train sharded models.

A hand-written test covers only cases that its author thought of. Here programs are drawn: a tree of modules, which of
them are units, a front end, a strategy and other options, and the calls that a user makes. All random tests share one
description of a program, one function that draws it, one player for each front end, and one reference. Each has its own
*judge*, which finds the errors.

A description is plain data, and its JSON form omits defaults. For example::

    {"model": {"kind": "chain", "children": [{"kind": "linear", "unit": true}, {"kind": "norm"}]},
     "strategy": "SHARD_GRAD_OP", "micro_batches": [false, true],
     "calls": [{"do": "evaluate", "batch": 3}]}

This is a model of two units, the linear layer and the root. It is trained for two steps. Each step has two
micro-batches, of which only the second one reduces gradients. Then it is evaluated on batch 3. `calls_of` returns these
calls: ``zero_grad``, ``sync(False)``, ``forward``, ``backward``, ``sync(True)``, ``forward``, ``backward``, ``step``
and so on.

==================  ============  ====================================================================================
tests               drawn kind    what the judge checks
==================  ============  ====================================================================================
``test_loops``      ``loops``     values, gradients and results are equal to the reference's
``test_pairs``      a table       the same, in rows with all pairs of options; a loaded model goes on with equal bits
``spec_tools``      ``calls``     each call is equal to the reference's or is refused by minifsdp; training goes on
``spec_tools``      ``apart``     each rank makes other calls, and gets an error or equal values; none waits for long
``test_races``      ``races``     on the simulated device: no race, and equal bits in other orders
==================  ============  ====================================================================================

Some seeds are fixed, so that a failing test points to a change. The command draws others, for as long as you want::

    python -m spec_tests.random_programs --minutes 30
    python -m spec_tests.random_programs calls apart --seed 17

A failure is reduced until no part can be removed. It ends with a command that can be pasted into a shell, and that runs
the program again::

    python -m spec_tests.random_programs '{"model":{"kind":"chain","children":[{"kind":"norm"}]},"forwards":2}'

* ``description.py``: a program as plain data, and its calls.
* ``draw.py``: draws random programs.
* ``modules.py``: the plain model, its batches, loss and optimizer.
* ``front_ends.py``: shards the model.
* ``sides.py``: the effect of each call on the sharded model.
* ``reference.py``: the same for the reference; ``spec_tests/oracles/single.py`` computes its gradients.
* ``player.py``: runs a program on a rank, and compares after each call.
* ``judge.py``: sends programs to the ranks, and reduces a failing one until no part can be removed.
* ``wrong.py``: calls that are wrong by themselves.
* ``pairs.py``: the table of combined options.
* ``races.py``: runs a program on the simulated device.
"""
