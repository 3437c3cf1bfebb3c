"""Compares the requirements that test runs prove with those that the recorded runs prove.

::

    python -m spec_tools.proven build/spec-results.json ../tools/build/spec-results.json

Each argument is the file that a test run writes. The record is ``docs/data/spec-results.json``. The command prints each
requirement that the record proves on a CPU or on the simulated accelerator, and that no given run proves there, because
it is no row of the spec, has no test, or its test failed. Then it returns 1.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "docs" / "data" / "spec-results.json"
BACKENDS = ("cpu-gloo", "simulated")


def proven(rows: Mapping[str, Any]) -> set[str]:
    """The requirements that have a proof on one of the backends."""
    return {row for row, found in rows.items() if "proven" in [found["results"].get(name) for name in BACKENDS]}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m spec_tools.proven")
    parser.add_argument("results", nargs="+", type=Path)
    before = proven(json.loads(RECORD.read_text())["rows"])
    now: set[str] = set()
    for path in parser.parse_args().results:
        now |= proven(json.loads(path.read_text()))
    lost = sorted(before - now)
    print(f"{len(before)} requirements proven before, {len(now)} now; not proven any more: {', '.join(lost) or 'none'}")
    return int(bool(lost))


if __name__ == "__main__":
    raise SystemExit(main())
