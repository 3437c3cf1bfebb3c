"""Runs one program again: ``python -m spec_tests.random_programs '<json>'``, from the root of the repository.

With ``--api torch_fsdp1``, torch runs the same program, which shows whether torch also fails. Returns 0 if the ranks
agree with one process; otherwise prints the difference and returns 1. With ``--races`` it runs on the simulated device.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_tests.random_programs.description import Description

NUM_SCHEDULES = 24

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    # Imported here, because ranks import this module too, as their parent's main module.
    from spec_tests.harness import pool
    from spec_tests.random_programs.description import from_json, legal
    from spec_tests.random_programs.judge import judged, replay_line, simplest

    parser = argparse.ArgumentParser(prog="python -m spec_tests.random_programs", description=__doc__)
    parser.add_argument("program", help="JSON from the report of a failure")
    parser.add_argument("--api", help="the API, instead of that in the description")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--races", action="store_true", help="simulate the device, with other orders of the streams")
    parser.add_argument("--shrink", action="store_true", help="simplify this program")
    parser.add_argument("--log", action="store_true", help="print the result of each call")
    chosen = parser.parse_args(arguments)
    pool.use_device(chosen.device)
    program = from_json(chosen.program)
    if chosen.api:
        program = legal(replace(program, api=chosen.api))
    if chosen.races:
        return _races(program)
    if chosen.shrink:
        program = simplest(program)
        print(replay_line(program))
    (verdict,) = judged([program])
    pool.close_all()
    if chosen.log:
        print(*verdict.log, sep="\n")
    print(verdict.found or "the ranks agree with one process")
    return 0 if verdict.found is None else 1


def _races(program: Description) -> int:
    from spec_tests.harness import simulated, worker
    from spec_tests.streams.scenarios import play

    worker.device_here = simulated.install()
    finding = play(program, NUM_SCHEDULES).finding
    print(finding or f"no collision, and equal bits in {NUM_SCHEDULES} schedules")
    return int(finding is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
