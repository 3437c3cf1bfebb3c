"""Reports about all ranks when a collective fails or waits too long.

``checks/collective_log.py`` records the collectives of this rank. This package exchanges the states of ranks through
the store of ``torch.distributed``. It uses a separate thread, so it also works if the main thread or the device is
blocked:

* ``process.py``: the start and the end of the watchdog, and the end of the program;
* ``watchdog.py``: the thread, and its channel through the store;
* ``report.py``: the state of a rank, the position where two ranks diverge, and the text of a report.

``ledger.py`` draws a report that was written to a file: ``python -m minifsdp.ledger FILE``.

A training step runs none of this code. The thread reads the store a few times a second.
"""
