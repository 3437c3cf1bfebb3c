"""The two or four processes of a race, and their results.

Each workload has new processes, so that it does not inherit memory, threads or a process group from another workload.
This file contains both sides: `run_race` starts ``python -m spec_tools.benchmarks.ranks``, which runs one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from spec_tools.benchmarks.race import Lap, Outcome, Times, race
from spec_tools.benchmarks.workloads import WORKLOADS

__all__ = ["run_race"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900.0  # seconds for one race


def run_race(workload: str, rounds: int) -> list[list[Outcome]]:
    """Runs a race with the number of ranks of the workload.

    Returns:
        The outcomes of all contenders, by rank.

    Raises:
        AssertionError: a rank failed; with its output.
    """
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        ranks = range(WORKLOADS[workload].num_ranks)
        outputs = [Path(folder, f"output-{rank}") for rank in ranks]
        processes = [_start(workload, rounds, rank, folder, outputs[rank]) for rank in ranks]
        try:
            _wait(processes)
            failed = [rank for rank, process in enumerate(processes) if process.returncode]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            raise AssertionError("\n".join(f"--- rank {rank} ---\n{outputs[rank].read_text()}" for rank in failed))
        return [_read(Path(folder, f"outcome-{rank}.json")) for rank in ranks]


def _start(workload: str, rounds: int, rank: int, folder: str, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "spec_tools.benchmarks.ranks", workload, str(rounds), str(rank), folder]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits until all processes end, or one has failed and the others have had some seconds to report it too."""
    deadline = time.monotonic() + LIMIT
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + 3.0)
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _read(path: Path) -> list[Outcome]:
    outcomes = json.loads(path.read_text())
    for outcome in outcomes:
        outcome["laps"] = [Lap(**{part: Times(*times) for part, times in lap.items()}) for lap in outcome["laps"]]
    return [Outcome(**outcome) for outcome in outcomes]


def main() -> None:
    """Runs one rank."""
    workload, rounds, rank, folder = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    # Ignore warnings about new names of torch's collectives, and others that do not apply to this program.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_ranks = workload.num_ranks
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    outcomes = race(workload, rounds)
    (folder / f"outcome-{rank}.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
