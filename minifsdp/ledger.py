"""``python -m minifsdp.ledger FILE``: runs the command of ``watchdog/ledger.py``.

*In torch:* ``torchfrtrace`` prints tables of NCCL's flight recorder.
"""

from minifsdp.watchdog.ledger import main

if __name__ == "__main__":
    main()
