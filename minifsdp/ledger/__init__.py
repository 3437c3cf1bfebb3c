"""What every rank is doing, told by those that are left when a collective fails.

``engine/ledger.py`` writes down what this rank sends. Here ranks tell each other, through the store of
``torch.distributed`` and from a thread of its own, so that neither a stuck main thread nor a stuck device can stop it:

* ``board.py``: where ranks put what they know of themselves, and how one asks all others;
* ``report.py``: what this rank knows of itself; where two ranks part; the words for it;
* ``watcher.py``: the thread, and the moments at which it speaks;
* ``process.py``: when it begins, and what is done when the program ends;
* ``python -m minifsdp.ledger FILE``: draws what was written to a file at such a moment.

Nothing of it runs in a training step; the thread looks at the store twice in a second.
"""
