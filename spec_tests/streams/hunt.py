"""A long search for races: ``python -m spec_tests.streams.hunt --number 3000 --seed 0``, from the repository root.

It runs thousands of scenarios in two processes. Each finished batch is a line in a file, so the same command continues
an interrupted search. At the end it prints the findings, simplified as much as possible, and the number of scenarios.
``--replay '<json>'`` runs a single scenario.

Returns 0 if nothing was found, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

BATCH = 25
APIS = ("fsdp1", "fully_shard")
# Fractions of all scenarios, by the names of `scenario.SHAPES`.
PARTS = {"1": 0.15, "2": 0.35, "4": 0.2, "2x2": 0.3}


def batches(number: int, seed: int, apis: list[str]) -> list[tuple[str, str, int]]:
    """Front end, shape and seed of each batch."""
    found = []
    for api in apis:
        for place, (shape, part) in enumerate(PARTS.items()):
            num = max(1, round(number * part / len(apis) / BATCH))
            found += [(api, shape, 1_000_000 * seed + 10_000 * place + i) for i in range(num)]
    return found


def play_batch(api: str, shape: str, seed: int, num_schedules: int) -> dict[str, Any]:
    """The results of one batch; runs in a worker process."""
    from spec_tests.harness import simulated, worker
    from spec_tests.streams.scenario import drawn
    from spec_tests.streams.scenarios import play, report, simplest

    worker.device_here = simulated.install()
    scenarios = drawn(BATCH, seed, shape, api)
    outcomes = [play(scenario, num_schedules, seed) for scenario in scenarios]
    failed = [scenario for scenario, outcome in zip(scenarios, outcomes, strict=True) if outcome.finding]
    return {
        "batch": [api, shape, seed],
        "scenarios": len(scenarios),
        "schedules": sum(outcome.num_schedules for outcome in outcomes),
        "operations": sum(outcome.num_operations for outcome in outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "findings": [report(simplest(scenario, num_schedules), num_schedules) for scenario in failed],
    }


def hunt(number: int, seed: int, apis: list[str], num_schedules: int, output: pathlib.Path) -> int:
    """Runs all batches that have no line in ``output`` yet; returns the total number of findings."""
    lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    known = {tuple(line["batch"]) for line in lines}
    wanted = batches(number, seed, apis)
    left = [batch for batch in wanted if batch not in known]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes, output.open("a") as file:
        for done in as_completed([processes.submit(play_batch, *batch, num_schedules) for batch in left]):
            line = done.result()
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
            print(*line["batch"], f"{line['seconds']} s", *line["findings"], sep="\n  ", flush=True)
    lines = [line for line in lines if tuple(line["batch"]) in set(wanted)]
    findings = [finding for line in lines for finding in line["findings"]]
    total = {key: sum(line[key] for line in lines) for key in ("scenarios", "schedules", "operations", "seconds")}
    print(*findings, sep="\n\n")
    print(", ".join(f"{value:g} {key}" for key, value in total.items()) + f", {len(findings)} findings")
    return len(findings)


def replay(text: str, num_schedules: int) -> int:
    """Runs a scenario from its JSON; returns 1 if there is a finding, else 0."""
    from spec_tests.harness import simulated, worker
    from spec_tests.streams.scenario import from_json, legal
    from spec_tests.streams.scenarios import play

    worker.device_here = simulated.install()
    finding = play(legal(from_json(text)), num_schedules).finding
    print(finding or f"no collision, and equal bits in {num_schedules} schedules")
    return int(finding is not None)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.streams.hunt", description=__doc__)
    parser.add_argument("--number", type=int, default=3000, help="of scenarios")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api", choices=APIS, action="append", help="one api only, instead of both")
    parser.add_argument("--schedules", type=int, default=6, help="in which each is executed again")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("scenarios.jsonl"))
    parser.add_argument("--replay", help="JSON, as a finding has printed it")
    chosen = parser.parse_args(arguments)
    if chosen.replay:
        return replay(chosen.replay, max(chosen.schedules, 24))
    found = hunt(chosen.number, chosen.seed, chosen.api or list(APIS), chosen.schedules, chosen.output)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
