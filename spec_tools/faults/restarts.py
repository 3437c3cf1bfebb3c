"""``python -m spec_tools.faults.restarts``: jobs under a real ``torchrun --max-restarts``; ``--record`` records them.

The matrix restarts each job itself, like torchrun. Here torchrun does it, for fewer jobs, because each process
that it starts imports torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spec_tools.benchmarks.page import circumstances
from spec_tools.faults.cells import ROOT, problem_about_disk
from spec_tools.faults.job import FAULTS
from spec_tools.faults.restarted import STRUCK_IN
from spec_tools.kills import moments

RECORD = ROOT / "docs" / "data" / "restarts.json"
APIS = ("wrapper", "fully_shard")
STRATEGIES = {"FULL_SHARD": 2, "HYBRID_SHARD": 4}  # with their numbers of ranks
MOMENTS = ("in a step", "in a save")
LIMIT = 240.0  # seconds; torchrun waits half a minute for a process that is stopped


@dataclass(frozen=True)
class Restart:
    """One job in which a rank has one fault."""

    api: str
    strategy: str
    fault: str
    victim: int
    moment: str

    @property
    def options(self) -> list[str]:
        return [f"--api={self.api}", f"--strategy={self.strategy}"]


def every_restart() -> Iterator[Restart]:
    """All combinations of the other values; the victims alternate between the last rank and rank 0."""
    everything = itertools.product(APIS, STRATEGIES, FAULTS, MOMENTS)
    for number, (api, strategy, fault, moment) in enumerate(everything):
        is_first = (number + number // 2) % 2 == 1
        yield Restart(api, strategy, fault, 0 if is_first else STRATEGIES[strategy] - 1, moment)


def run_all(restarts: Iterable[Restart], at_once: int = 2) -> list[tuple[float, str]]:
    """For each job, the duration of both runs in seconds and the problem."""
    restarts = list(restarts)
    kinds = {(restart.api, restart.strategy): restart for restart in restarts}
    curves = {kind: undisturbed(restart) for kind, restart in kinds.items()}
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda restart: run(restart, curves[restart.api, restart.strategy]), restarts))


def undisturbed(restart: Restart) -> list[float]:
    """The losses of a job without a fault and without checkpoints."""
    with tempfile.TemporaryDirectory() as kept:
        num_ranks = STRATEGIES[restart.strategy]
        outcome = moments.run(Path(kept) / "work", save=None, num_ranks=num_ranks, options=restart.options)
        assert outcome.codes == [0] * num_ranks, outcome.outputs
        return outcome.losses


def run(restart: Restart, losses: list[float]) -> tuple[float, str]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as kept:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        script = ["--nproc-per-node", str(STRATEGIES[restart.strategy]), str(Path(__file__).with_name("restarted.py"))]
        what = [restart.fault, str(restart.victim), restart.moment, kept, *restart.options]
        done = subprocess.run(
            [*launch, *script, *what], capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT
        )
        seconds = time.monotonic() - begun
        if done.returncode:
            return seconds, f"torchrun has ended with {done.returncode}: {done.stderr[-3000:]}"
        reported = json.loads((Path(kept) / "result").read_text())
        expected = {"losses": losses, "starts": 2, "begun at": [STRUCK_IN - moments.EVERY]}
        if reported != expected:
            return seconds, f"{reported}, and should be {expected}"
        return seconds, problem_about_disk(Path(kept) / "runs", f"step-{moments.STEPS:06}")


def main() -> int:
    """Runs the command. Returns the number of jobs with a problem."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.faults.restarts")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    options = parser.parse_args()
    begun, restarts = time.monotonic(), list(every_restart())
    rows, num_wrong = [], 0
    for restart, (seconds, problem) in zip(restarts, run_all(restarts, options.at_once), strict=True):
        print(f"{restart}: {problem or 'continues correctly'}, {seconds:.0f} s", flush=True)
        rows.append({**vars(restart), "seconds": None if problem else round(seconds)})
        num_wrong += bool(problem)
    if options.record:
        lines = ",\n  ".join(map(json.dumps, rows))
        reported = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        RECORD.write_text(f'{reported},\n "jobs": [\n  {lines}\n ]\n}}\n')
    return num_wrong


if __name__ == "__main__":
    raise SystemExit(main())
