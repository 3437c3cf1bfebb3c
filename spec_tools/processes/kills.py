"""Kill -9 of a rank at a moment of a save, and the next run. Jobs that a real ``torchrun --max-restarts`` restarts.

The matrix restarts each job itself, like torchrun. `restart` lets torchrun do it, for fewer jobs, because each process
that it starts imports torch.

Each moment of a save needs two runs. In the first run, a rank is killed. Then the folder is checked, by code that is
independent of the code under test. The second run continues. Its losses must be bitwise equal to those of a run that is
never interrupted and never saves.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spec_tools.processes.faults import FAULTS, whole_checkpoints
from spec_tools.processes.ranks import ROOT, result_of, start
from spec_tools.processes.train import STEPS, Moment

APIS = ("wrapper", "fully_shard")
LIMIT = 90.0  # seconds for a run
RESTART_LIMIT = 240.0  # seconds; torchrun waits half a minute for a process that is stopped
GRACE = 30.0  # seconds for the survivors to detect that a rank has ended
PART, FILE = r"\.step-000004\.part", r"\.step-000004\.part/(__\d_0\.distcp|full\.pt)"


@dataclass(frozen=True)
class Case:
    """A training in which one rank has a fault at one moment.

    Attributes:
        api: one of `APIS`.
        moment: the rank, its fault, and the moment.
        form: of the checkpoints, ``sharded`` or ``full``.
        strategy: a key of `STRATEGIES`.
    """

    api: str
    moment: Moment
    form: str = "sharded"
    strategy: str = "FULL_SHARD"

    def __str__(self) -> str:
        where = f"{self.moment.name} on rank {self.moment.victim}"
        return f"{self.api}, {self.strategy}, {self.form}: {self.moment.fault} {where}"


# The moments that the protocol of the tutorial's `checkpoint` distinguishes, in the order of a save of step 4. Each
# earlier save writes the pointer once. The first checkpoint is removed after step 6.
NAMED = [
    ("sharded", Moment("before the folder beside", f"mkdir {PART}")),
    # Rank 1 has no file of its own in a full checkpoint.
    ("sharded", Moment("before the first byte", f"open {PART}/__1_0.distcp", victim=1)),
    ("sharded", Moment("before a file is flushed", f"fsync {FILE}")),
    ("sharded", Moment("before a file is flushed", f"fsync {FILE}", victim=1)),
    ("full", Moment("before a file is flushed", f"fsync {FILE}")),
    ("sharded", Moment("before the manifest", rf"open {PART}/\.manifest\.json\.part")),
    ("full", Moment("before the manifest has its name", f"rename {PART}/manifest.json")),
    ("sharded", Moment("before the folder is flushed", f"fsync {PART}")),
    ("sharded", Moment("before the rename", "rename step-000004")),
    ("sharded", Moment("between rename and pointer", r"open \.newest\.part", nth=1)),
    ("full", Moment("between rename and pointer", r"open \.newest\.part", nth=1)),
    ("sharded", Moment("before the pointer has its name", "rename newest", nth=1)),
    ("sharded", Moment("before the old one is hidden", r"rename \.step-000002\.old")),
    ("sharded", Moment("in the middle of removing the old one", "remove a file", nth=1)),
]


def kills() -> Iterator[Case]:
    """Fifty kills for each API, three of four at named moments, and one before a random call after a save."""
    chance = random.Random(1)
    for api, index in itertools.product(APIS, range(50)):
        if index % 4 == 3:
            victim = chance.randrange(2)
            # In a sharded save, rank 0 makes about twenty calls, and rank 1 makes three.
            nth = chance.randrange(20, 34) if victim == 0 else chance.randrange(5, 9)
            yield Case(api, Moment("before a call", "(open|rename|mkdir|fsync|remove) .*", nth, victim))
        else:
            form, moment = chance.choice(NAMED)
            yield Case(api, moment, form)


def resume(case: Case, folder: Path) -> None:
    """Kills a rank and runs again.

    Raises:
        AssertionError: a checkpoint was lost or damaged, or the second run differs from the uninterrupted one.
    """
    victim = case.moment.victim
    arguments = (str(folder), case.form, json.dumps([asdict(case.moment)]), f"--api={case.api}")
    with start("spec_tools.processes.train", *arguments, folder=folder / "first") as ranks:
        codes = ranks.wait(LIMIT, [victim]) + ranks.wait(GRACE, [1 - victim])
    assert codes[0] == -9, f"the rank was not killed: {codes}\n{ranks.all_errors()}"
    assert codes[1] is not None, f"a survivor hung: {ranks.errors(1 - victim)}"
    runs = folder / "runs"
    whole = whole_checkpoints(runs)
    announced = (runs / "newest").read_text()
    assert announced in whole, whole
    result = finished(case.api, case.form, folder)
    assert result == {"losses": uninterrupted(case.api), "resumed at": [int(announced[5:])]}, result
    # No temporary file remains, and all checkpoints to keep exist. If the run was killed after its last save, no later
    # save has removed the oldest one.
    left = {path.name for path in runs.iterdir()} - ({"step-000002"} if announced == "step-000006" else set())
    assert left == {"newest", "step-000004", "step-000006"}, left
    whole_checkpoints(runs)


def finished(api: str, form: str, folder: Path, num_ranks: int = 2, strategy: str = "FULL_SHARD") -> dict[str, Any]:
    """The result of a run without a fault."""
    command = ("spec_tools.processes.train", str(folder), form, "[]", f"--api={api}", f"--strategy={strategy}")
    options = {"file": folder / "result", "folder": folder / "last", "limit": LIMIT, "num_ranks": num_ranks}
    result: dict[str, Any] = result_of(*command, **options)
    return result


@cache
def uninterrupted(api: str, strategy: str = "FULL_SHARD", num_ranks: int = 2) -> list[float]:
    """The losses of a run that never fails and never saves."""
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = finished(api, "none", Path(folder), num_ranks, strategy)["losses"]
    assert len(set(losses)) == STEPS
    return losses


# ---- restarts ----

STRATEGIES = {"FULL_SHARD": 2, "HYBRID_SHARD": 4}  # with their numbers of ranks
# In the fourth step, or in the save after it.
MOMENTS = [("in a step", "loss", 3), ("in a save", "written", 1)]


def restarts() -> Iterator[Case]:
    """All combinations of the other values; the victims alternate between the last rank and rank 0."""
    everything = itertools.product(APIS, STRATEGIES, FAULTS, MOMENTS)
    for number, (api, strategy, fault, moment) in enumerate(everything):
        is_first = (number + number // 2) % 2 == 1
        victim = 0 if is_first else STRATEGIES[strategy] - 1
        yield Case(api, Moment(*moment, victim, fault), strategy=strategy)


def restart(case: Case, folder: Path) -> None:
    """Runs the job, which torchrun restarts.

    Raises:
        AssertionError: torchrun fails, or the job does not continue with the losses of an uninterrupted one.
    """
    num_ranks = STRATEGIES[case.strategy]
    launch = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1", f"--nproc-per-node={num_ranks}"]
    arguments = [str(folder), case.form, json.dumps([asdict(case.moment)])]
    options = [f"--api={case.api}", f"--strategy={case.strategy}"]
    done = subprocess.run(
        [sys.executable, *launch, str(Path(__file__).with_name("train.py")), *arguments, *options],
        capture_output=True,
        text=True,
        timeout=RESTART_LIMIT,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"torchrun has ended with {done.returncode}: {done.stderr}"
    assert (folder / "struck-0").exists(), "the fault did not occur"
    losses = uninterrupted(case.api, case.strategy, num_ranks)
    result = json.loads((folder / "result").read_text())
    assert result == {"losses": losses, "resumed at": [2]}, f"{result}, and the losses should be {losses}"
    assert whole_checkpoints(folder / "runs") == ["step-000004", "step-000006"]
