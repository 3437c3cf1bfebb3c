"""``python -m spec_tools.breaks``: runs breaks and reports those that tests or programs do not notice."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from spec_tools.breaks import record
from spec_tools.breaks.cases import CASES
from spec_tools.breaks.edits import BREAKS, Break
from spec_tools.breaks.runner import run


def main() -> int:
    """Returns 0 if everything that must notice a break noticed it."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.breaks", description=__doc__)
    parser.add_argument("names", nargs="*", help="only breaks whose name or requirements contain one of these texts")
    parser.add_argument("--sample", type=int, help="only so many of them, always the same")
    parser.add_argument("--device", choices=["cpu", "simulated"], help="only breaks that are noticed on this device")
    parser.add_argument("--record", action="store_true", help="add the results to docs/data")
    options = parser.parse_args()
    chosen = [one for one in chosen_by(options.names) if options.device in (None, one.device)]
    if options.sample:
        # Not the breaks of exercises: their tests need minutes.
        chosen = [one for one in chosen if not any(row.startswith("LEARN") for row in one.rows)]
        chosen = random.Random(0).sample(chosen, min(options.sample, len(chosen)))
    results = {}
    for one in chosen:
        start = time.monotonic()
        results[one.name] = result = run(one)
        print(f"{one.name:48s} {time.monotonic() - start:5.1f} s  {result}", flush=True)
        if options.record and not result.end and one.name in BREAKS:
            record.add(one, result)
    wrong = [name for name, result in results.items() if result.blind or result.others or result.end]
    print(f"\n{len(results)} breaks, not noticed as they must be: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


def chosen_by(words: Sequence[str]) -> list[Break]:
    """The breaks with one of the words in the name or the requirements; all of the catalogue without words."""
    if not words:
        return [*BREAKS.values()]
    every = [*BREAKS.values(), *CASES.values()]
    return [one for one in every if any(word in f"{one.name} {one.rows}" for word in words)]


if __name__ == "__main__":
    raise SystemExit(main())
