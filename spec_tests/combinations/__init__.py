"""Options together that were never tried together, compared with one process.

A test of ``no_sync`` has the usual precision, one of low precision does not accumulate, and so a mistake that needs
both waits for a user who has both. All options at once are too many: the twelve of the wrapper alone have 345600
combinations. But hardly a mistake needs more than three of them. So a table is drawn in which each *three* values of
different options meet in some row; on four ranks, where a row costs four times as much, each two. With three options of
two values, and each two values wanted::

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
error. No row has them, and each is tried in the company of all other options.

* ``table.py``: the options, the refusals, and from a row to its run.
* ``covering.py``: draws the table.

*Not used:* ``allpairspy`` (2.5.1) draws pairs, but with refusals it leaves out some that are possible (11 of 511 here),
and as triples a quarter. Forty lines that leave out none are in ``covering.py``; the tests count.
"""
