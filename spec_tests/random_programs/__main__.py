"""Runs random programs with new seeds, or one program again. From the root of the repository::

    python -m spec_tests.random_programs --minutes 30          all kinds, for as long as you want
    python -m spec_tests.random_programs calls --seed 17       one kind; the same programs in the same order
    python -m spec_tests.random_programs '{"model": ...}'      one program, from the report of a failure

For each failure it prints the smallest program that fails in the same way, and the command that runs it again. Its exit
status is 1 if anything failed. With ``--api torch_wrapped``, torch runs the same program, which shows whether torch
also fails. On a very busy machine, ranks may not rendezvous in time, which causes a false finding.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_tests.random_programs.description import Description

os.environ.setdefault("OMP_NUM_THREADS", "1")

KINDS = ("loops", "pairs", "calls", "apart", "races")
APIS = ("wrapped", "fully_shard")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    # Imported here, because ranks import this module too, as their parent's main module.
    from spec_tests.harness import pool

    parser = argparse.ArgumentParser(prog="python -m spec_tests.random_programs", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"some of {', '.join(KINDS)}, or one program as JSON; default: all")
    parser.add_argument("--api", help="only this API; for one program, instead of its own")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="another one each time, if it is not given")
    parser.add_argument("--device", choices=["cpu", "cuda", "simulated"], default="cpu", help="for one program")
    chosen = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4)) if chosen.seed is None else chosen.seed
    try:
        if chosen.what and chosen.what[0].startswith("{"):
            return replayed(chosen.what[0], chosen.api, chosen.device)
        return hunt(chosen.what or KINDS, [chosen.api] if chosen.api else APIS, chosen.minutes, seed)
    finally:
        pool.close_all()


def replayed(text: str, api: str | None, device: str) -> int:
    """Runs one program again. Returns 1 if it fails."""
    from spec_tests.harness import pool
    from spec_tests.random_programs import judge, races
    from spec_tests.random_programs.description import from_json, legal

    pool.use_device(device)
    program = from_json(text)
    if api:
        program = legal(replace(program, api=api))
    (verdict,) = (races if device == "simulated" else judge).judged([program])
    print(verdict.found or "no finding")
    return int(verdict.found is not None)


def hunt(kinds: list[str], apis: list[str], minutes: float, seed: int) -> int:
    """Runs batches of all kinds in turn until the time is over, at least one. Returns 1 if any program fails."""
    from spec_tests.harness import pool
    from spec_tests.random_programs import judge, races

    print(f"seed {seed}", flush=True)
    dice, end = random.Random(seed), time.monotonic() + 60 * minutes
    tried: Counter[str] = Counter()
    num_failures = 0
    try:
        for kind, api in itertools.cycle(itertools.product(kinds, apis)):
            is_simulated = kind == "races"
            pool.use_device("simulated" if is_simulated else "cpu")
            programs = batch_of(kind, api, dice.getrandbits(32))
            failure = judge.failure_of(programs, races.judged if is_simulated else judge.judged)
            tried[f"{kind} of {api}"] += len(programs)
            if failure is not None:
                num_failures += 1
                print(failure, flush=True)
            if time.monotonic() > end:
                break
    except KeyboardInterrupt:
        print("stopped")
    for name, number in tried.items():
        print(f"{number:8} {name}")
    print(f"{tried.total():8} programs in all, {num_failures} batches with a finding", flush=True)
    return int(num_failures > 0)


def batch_of(kind: str, api: str, seed: int) -> list[Description]:
    """Some programs of a kind; the same seed gives the same ones."""
    from spec_tests.random_programs.draw import SHAPES, drawn
    from spec_tests.random_programs.pairs import OPTIONS, description_of, table

    shapes = random.Random(seed)
    if kind == "pairs":
        programs = [description_of(row, api, seed) for row in table(OPTIONS[api], seed)]
        return sorted(programs, key=lambda program: program.num_ranks)
    if kind == "races":
        return drawn(kind, 10, seed, api, shapes.choice(list(SHAPES)))
    # Two ranks are most likely, because the comparison is bitwise there.
    return drawn(kind, 25, seed, api, shapes.choice(["1", "2", "2", "2", "3", "4"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
