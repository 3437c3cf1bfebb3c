"""Runs one description again: ``python -m spec_tests.properties.replay '<json>'``, from the root of the repository.

With ``--api torch_fsdp1``, torch runs the same description, which shows whether torch also fails. Returns 0 if the
ranks agree with one process; otherwise prints the difference and returns 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    # Imported here, because ranks import this module too, as their parent's main module.
    from spec_tests.harness import pool
    from spec_tests.properties.description import from_json, legal
    from spec_tests.properties.hunt import failure_of

    parser = argparse.ArgumentParser(prog="python -m spec_tests.properties.replay", description=__doc__)
    parser.add_argument("description", help="JSON, as a failure has printed it")
    parser.add_argument("--api", help="who shards, instead of the one in the description")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.parse_args(arguments)
    pool.use_device(chosen.device)
    description = from_json(chosen.description)
    if chosen.api:
        description = legal(replace(description, api=chosen.api))
    failure = failure_of(description)
    pool.close_all()
    print(failure or "the ranks agree with one process")
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
