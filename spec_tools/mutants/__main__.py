"""``python -m spec_tools.mutants``: runs mutants and reports requirements whose tests do not fail."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from spec_tools.mutants import record
from spec_tools.mutants.catalogue import MUTANTS
from spec_tools.mutants.mutant import Mutant
from spec_tools.mutants.runner import Result, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the tests of all requirements detected their mutants."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name or rows contain one of these words")
    parser.add_argument("--sample", type=int, help="the number of earlier detected mutants to repeat; writes no record")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--fresh", action="store_true", help="delete the results of an interrupted run")
    options = parser.parse_args(arguments)
    if options.sample:
        names = [name for name in record.noticed_before() if name in MUTANTS]
        chosen = random.Random(options.seed).sample(names, min(options.sample, len(names)))
        return _summary([_run(MUTANTS[name]) for name in chosen])
    if options.fresh:
        record.LINES.unlink(missing_ok=True)
    results = record.read_lines(MUTANTS)
    for mutant in MUTANTS.values():
        if mutant.name not in results and _is_meant(mutant, options.words):
            results[mutant.name] = _run(mutant)
            if not results[mutant.name].end:
                record.append(mutant, results[mutant.name])
    record.write(MUTANTS, [result for result in results.values() if not result.end])
    return _summary([result for result in results.values() if _is_meant(MUTANTS[result.name], options.words)])


def _is_meant(mutant: Mutant, words: Sequence[str]) -> bool:
    return not words or any(word in f"{mutant.name} {mutant.rows}" for word in words)


def _run(mutant: Mutant) -> Result:
    start = time.monotonic()
    result = run(mutant)
    said = "noticed" if not result.blind else f"NOT NOTICED by {' '.join(result.blind)}"
    print(f"{mutant.name:48s} {time.monotonic() - start:5.1f} s  {said}  {result.end}", flush=True)
    return result


def _summary(results: Sequence[Result]) -> int:
    missed = [result for result in results if result.blind]
    unnoticed = [result.name for result in missed if not result.red]
    print(f"\n{len(results)} mutants, {len(unnoticed)} not detected by any test: {', '.join(unnoticed) or 'none'}")
    for result in missed:
        print(f"  {result.name} ({MUTANTS[result.name].what}): {' '.join(result.blind)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
