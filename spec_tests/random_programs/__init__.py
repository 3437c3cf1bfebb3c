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

=====================================  ============  ================================================================
tests                                  drawn kind    what the judge checks
=====================================  ============  ================================================================
``parity/test_properties``              ``loops``     values, gradients and results are equal to the reference's
``combinations``                       a table       the same, in rows with all pairs of options; a loaded model goes
                                                     on with bitwise equal values
``fuzz``                               ``calls``     each call is equal to the reference's or is refused by minifsdp;
                                                     training goes on
``fuzz``, ranks differ                 ``apart``     each rank gets an error or equal values, and none waits for long
``streams/test_scenarios``             ``races``     on the simulated device: no race, and equal bits in other orders
``hunt``                               all kinds     the same as above, with new seeds, for as long as you want
=====================================  ============  ================================================================

* ``description.py``: a program as plain data, and its calls.
* ``draw.py``: draws random programs.
* ``modules.py``: the plain model, its batches, loss and optimizer.
* ``front_ends.py``: shards the model.
* ``sides.py``: the effect of each call on the sharded model.
* ``reference.py``: the same for the reference; ``spec_tests/oracles/single.py`` computes its gradients.
* ``player.py``: runs a program on a rank, and compares after each call.
* ``judge.py``: sends programs to the ranks, and reduces a failing one until no part can be removed.
* ``wrong.py``: calls that are wrong by themselves.
* ``__main__.py``: ``python -m spec_tests.random_programs '<json>'`` runs one program again.

A failure ends with such a command line, which can be pasted into a shell.

Two environment variables set the number of training loops and the seed::

    export MINIFSDP_PROPERTY_EXAMPLES=3000 MINIFSDP_PROPERTY_SEED=17
    python -m pytest -s spec_tests/parity/test_properties.py

By default, some hundred loops are drawn, always the same ones.
"""
