"""Reports about all ranks when a collective fails or waits too long.

``engine/collective_log.py`` records the collectives of this rank. Here the ranks exchange their states through the
store of ``torch.distributed``, from a thread of its own, so that neither a blocked main thread nor a blocked device
prevents it:

* ``process.py``: the start and the end of the watchdog, signals, and the end of the program;
* ``watchdog.py``: the thread, and its channel through the store;
* ``report.py``: the state of a rank, the position where two ranks diverge, and the text of a report.

``python -m minifsdp.ledger FILE`` draws a report that was written to a file.

None of it runs in a training step. The thread reads the store a few times a second.
"""
