"""Reports about all ranks when a collective fails or waits too long.

``engine/ledger.py`` records the collectives of this rank. Here the ranks exchange their states through the store of
``torch.distributed``, from a thread of its own, so that neither a blocked main thread nor a blocked device prevents it:

* ``board.py``: the channel through the store;
* ``report.py``: the state of a rank, the position where two ranks diverge, and the text of a report;
* ``watcher.py``: the watchdog thread;
* ``process.py``: its start and end, signals, and the end of the program;
* ``neighbours.py``: whether the process of another rank on this machine has ended;
* ``python -m minifsdp.ledger FILE``: draws a report that was written to a file.

None of it runs in a training step. The thread reads the store twice a second.
"""
