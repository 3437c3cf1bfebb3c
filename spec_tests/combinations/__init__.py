"""Combinations of options, compared with a single process.

Most tests change one option, so a defect that needs ``no_sync`` *and* low precision is found only by a user who sets
both. Testing all combinations is impossible: the twelve options of the wrapper alone have 345600. But few defects need
more than three options. So a table is drawn in which every pair of values of different options occurs in a row. On two
ranks, where a row costs a quarter, this also holds for every *triple* of values of the options that affect the time
between two steps. For example, three options with two values each need these rows to cover all pairs::

    offload  tied   checkpoint
    no       no     no
    no       yes    yes
    yes      no     yes
    yes      yes    no             four rows for twelve pairs, instead of eight rows

A row is a training loop of ``spec_tests/random_programs``. The model is always the same; each of its units has a small
difficulty. It is trained for two steps and compared after each half step with one process that computes all batches: on
two ranks mostly bitwise, otherwise with a stated tolerance. Between the steps, model and optimizer are saved in the
row's form and loaded into others, which also run the second step and must end with bitwise equal values.

Refused combinations are tested as well. `table.REFUSALS` lists each pair of values that exclude each other, with the
error. No row contains such a pair. A separate test combines each of them with all pairs of other values.

* ``table.py``: the options, the refusals, and the conversion of a row to a training run.
* ``covering.py``: draws the table.

Cost: 227 rows, with about 0.2 s of CPU time per rank and row.

*Not used:* ``allpairspy`` (2.5.1) draws pairs, but with refusals it omits some possible ones (11 of 522 in a similar
table), and a quarter of the triples. The few lines in ``covering.py`` omit none, and the tests check this.
"""
