"""``python -m minifsdp``: runs the command of ``debugging/explain_error.py``.

*In torch:* no such command.
"""

from minifsdp.debugging.explain_error import main

if __name__ == "__main__":
    raise SystemExit(main())
