"""Options together that were never tried together, compared with one process.

A test of ``no_sync`` has the usual precision, one of low precision does not accumulate, and so a mistake that needs
both waits for a user who has both. All options at once are too many: the twelve of the wrapper alone have 345600
combinations. But hardly a mistake needs more than three of them. So a table is drawn in which each two values of
different options meet in some row, and on two ranks, where a row costs a fourth, also each *three* of those options
that decide what happens between two steps. With three options of two values, and each two values wanted::

    offload  tied   checkpoint
    no       no     no
    no       yes    yes
    yes      no     yes
    yes      yes    no             four rows for twelve pairs, instead of eight rows

A row is a training run of ``spec_tests/properties``: the model is always the same, and difficult in a small way in each
of its units. It is trained for two steps and held, after each half step, against one process on all batches: bit by
bit on two ranks in most rows, and within a stated tolerance elsewhere. In between, model and optimizer are saved in the
row's form. Others, loaded with that, do the second step, too, and must end with the same bits.

What is refused is not left out in silence: `table.REFUSALS` names each two values that exclude each other, with the
error. No row has them, and each is tried in the company of any other two values.

* ``table.py``: the options, the refusals, and from a row to its run.
* ``covering.py``: draws the table.

Price: 227 rows, about 0.2 s of each rank's CPU for a row.

*Not used:* ``allpairspy`` (2.5.1) draws pairs, but with refusals it leaves out some that are possible (11 of 522 in a
table like this one), and of triples a quarter. Few lines that leave out none are in ``covering.py``; the tests count.
"""
