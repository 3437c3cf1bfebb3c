"""``python -m spec_tests.healthy PROGRAM API``: one rank of a program of ``programs/lives.py``.

Prints ``right`` when the program has finished, unless the program prints it itself at its very end, and then the time.
"""

from __future__ import annotations

import sys
import time

import torch

from spec_tests.healthy.programs import lives


def main() -> None:
    name, api = sys.argv[1:]
    torch.set_num_threads(1)
    getattr(lives, name)(api)
    if not name.startswith("exit_handlers"):
        print("right", flush=True)
    print("over at", time.time(), flush=True)


if __name__ == "__main__":
    main()
