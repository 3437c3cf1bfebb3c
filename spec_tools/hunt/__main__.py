"""``python -m spec_tools.hunt --minutes 30``, from the root of the repository."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from spec_tests.harness import pool
from spec_tools.hunt.generators import GENERATORS, Generator

__all__ = ["hunt", "main", "replay"]

FOLDER = Path("build/findings")


def hunt(generators: Mapping[str, Generator], minutes: float, seed: int, folder: Path = FOLDER) -> list[Path]:
    """Cycles through the generators until the time is over, and tries at least one batch.

    Returns:
        The files of the findings.
    """
    print(f"seed {seed}", flush=True)
    dice, end = random.Random(seed), time.monotonic() + 60 * minutes
    tried: Counter[str] = Counter()
    files: list[Path] = []
    try:
        for name in itertools.cycle(generators):
            number = dice.getrandbits(32)
            cases = generators[name].draw(number)
            findings = generators[name].findings(cases)
            tried[name] += len(cases)
            failed = [(case, text) for case, text in zip(cases, findings, strict=True) if text]
            for place, (case, text) in enumerate(failed):
                file = folder / f"{name}-{number}-{place}.json"
                files.append(file)
                _write(file, name, case, text)
                print(f"found: {file}", flush=True)
            if failed:
                # Only the first failure, because the others often have the same cause.
                _make_smaller(files[-len(failed)], generators[name], name, *failed[0])
            if time.monotonic() > end:
                break
    except KeyboardInterrupt:
        print("stopped")
    finally:
        pool.close_all()
    for name in generators:
        print(f"{tried[name]:8} cases of {name}")
    print(f"{tried.total():8} cases in all, {len(files)} findings", *files, sep="\n", flush=True)
    return files


def _make_smaller(file: Path, generator: Generator, name: str, case: str, text: str) -> None:
    small = generator.simplest(case)
    again = generator.findings([small])[0]
    _write(file, name, small, again or f"Not seen again; at first:\n{text}", as_drawn=json.loads(case))


def _write(file: Path, name: str, case: str, text: str, **others: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"generator": name, "case": json.loads(case), **others, "found": text}
    file.write_text(json.dumps(about, indent=1) + "\n")


def replay(file: Path) -> bool:
    """Runs the case of a file again and prints the result. Returns whether anything was found."""
    about = json.loads(file.read_text())
    try:
        found = GENERATORS[about["generator"]].findings([json.dumps(about["case"])])[0]
    finally:
        pool.close_all()
    print(found or "nothing is found")
    return found is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.hunt")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="another one each time, if it is not given")
    parser.add_argument("--only", choices=GENERATORS, action="append", help="one generator, instead of all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the files of what is found")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try the case of this file again")
    chosen = parser.parse_args(arguments)
    # SIGTERM also prints the number of cases tried so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if chosen.replay:
        return int(replay(chosen.replay))
    seed = int.from_bytes(os.urandom(4)) if chosen.seed is None else chosen.seed
    generators = {name: GENERATORS[name] for name in chosen.only or GENERATORS}
    return int(bool(hunt(generators, chosen.minutes, seed, chosen.folder)))


if __name__ == "__main__":
    sys.exit(main())
