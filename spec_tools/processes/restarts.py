"""Jobs that a real ``torchrun --max-restarts`` restarts after a fault.

The matrix restarts each job itself, like torchrun. Here torchrun does it, for fewer jobs, because each process
that it starts imports torch.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spec_tools.processes import kills
from spec_tools.processes.faults import FAULTS, whole_checkpoints
from spec_tools.processes.ranks import ROOT
from spec_tools.processes.train import Moment

STRATEGIES = {"FULL_SHARD": 2, "HYBRID_SHARD": 4}  # with their numbers of ranks
# In the fourth step, or in the save after it.
MOMENTS = {"in a step": ("loss", 3), "in a save": ("written", 1)}
LIMIT = 240.0  # seconds; torchrun waits half a minute for a process that is stopped


@dataclass(frozen=True)
class Restart:
    """One job in which a rank has one fault."""

    api: str
    strategy: str
    fault: str
    victim: int
    moment: str


def restarts() -> Iterator[Restart]:
    """All combinations of the other values; the victims alternate between the last rank and rank 0."""
    everything = itertools.product(kills.APIS, STRATEGIES, FAULTS, MOMENTS)
    for number, (api, strategy, fault, moment) in enumerate(everything):
        is_first = (number + number // 2) % 2 == 1
        yield Restart(api, strategy, fault, 0 if is_first else STRATEGIES[strategy] - 1, moment)


def resume(restart: Restart, folder: Path) -> None:
    """Runs the job.

    Raises:
        AssertionError: torchrun fails, or the job does not continue with the losses of an uninterrupted one.
    """
    label, nth = MOMENTS[restart.moment]
    moment = Moment(restart.moment, label, nth, restart.victim, restart.fault)
    num_ranks = STRATEGIES[restart.strategy]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
            *(f"--nproc-per-node={num_ranks}", str(Path(__file__).with_name("train.py")), str(folder), "sharded"),
            *(json.dumps([asdict(moment)]), f"--api={restart.api}", f"--strategy={restart.strategy}"),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"torchrun has ended with {done.returncode}: {done.stderr}"
    assert (folder / "struck-0").exists(), "the fault did not occur"
    losses = kills.uninterrupted(restart.api, restart.strategy, num_ranks)
    result = json.loads((folder / "result").read_text())
    assert result == {"losses": losses, "resumed at": [2]}, f"{result}, and the losses should be {losses}"
    assert whole_checkpoints(folder / "runs") == ["step-000004", "step-000006"]
