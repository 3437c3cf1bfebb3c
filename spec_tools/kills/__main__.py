"""``python -m spec_tools.kills``: kill -9 at 50 moments of a save, for each API. ``--record`` stores them.

Each moment needs two runs. In the first run, a rank is killed. Then the folder is checked, by code that is independent
of the code under test. The second run continues. Its losses must be bitwise equal to those of a run that is never
interrupted and never saves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from spec_tools.kills import moments
from spec_tools.kills.moments import EVERY, STEPS, Moment, Outcome

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "kills.json"
APIS = ("wrapper", "fully_shard")
NUM_RECORDED = 50  # moments, for each API
SLOWEST_SAVE = 0.12  # seconds; timed moments are shorter


def named_moments() -> list[Moment]:
    """The moments that the protocol of `checkpoint` distinguishes, in the order of a save."""
    part, file = r"\.step-{step}\.part", r"\.step-{step}\.part/(__\d_0\.distcp|full\.pt)"
    named = [
        # Rank 1 has no file of its own in a full checkpoint.
        Moment("before the folder beside", label=f"mkdir {part}"),
        Moment("before the first byte", label=f"open {part}/__1_0.distcp", victim=1),
        Moment("in the middle of a file", label=f"open {part}/__0_0.distcp", after_bytes=9_000),
        Moment("in the middle of a file", label=f"open {part}/__1_0.distcp", after_bytes=9_000, victim=1),
        Moment("in the middle of the full file", label=f"mkdir {part}", after_bytes=15_000, full=True),
        Moment("before a file is flushed", label=f"fsync {file}"),
        Moment("before a file is flushed", label=f"fsync {file}", victim=1),
        Moment("before a file is flushed", label=f"fsync {file}", full=True),
        Moment("before the manifest", label=rf"open {part}/\.manifest\.json\.part"),
        Moment("before the manifest has its name", label=f"rename {part}/manifest.json", full=True),
        Moment("before the folder is flushed", label=f"fsync {part}"),
        Moment("before the rename", label="rename step-{step}"),
        Moment("between rename and pointer", label=r"open \.newest\.part"),
        Moment("between rename and pointer", label=r"open \.newest\.part", full=True),
        Moment("before the pointer has its name", label="rename newest"),
        Moment("before the old one is hidden", step=6, label=r"rename \.step-000002\.old"),
        Moment("in the middle of removing the old one", step=6, label="remove a file", nth=1),
    ]
    return [at_step(moment) for moment in named]


def at_step(moment: Moment) -> Moment:
    # Every save writes the pointer; select the call of this save.
    nth = moment.nth if "step" in moment.label or "remove" in moment.label else moment.step // EVERY - 1
    return Moment(**{**vars(moment), "label": moment.label.replace("{step}", f"{moment.step:06}"), "nth": nth})


def drawn_moments(number: int, seed: int = 1) -> list[Moment]:
    """In each group of five moments, three are named, one is after some milliseconds, and one is before a random
    call."""
    chance = random.Random(seed)
    named: list[Moment] = []
    drawn: list[Moment] = []
    for index in range(number):
        step, victim, full = chance.choice([4, 6]), chance.randrange(2), chance.random() < 0.3
        if index % 5 == 3:
            milliseconds = chance.uniform(0, 1000 * SLOWEST_SAVE)
            name = f"after {milliseconds:.1f} ms"
            drawn.append(Moment(name, step, seconds=milliseconds / 1000, victim=victim, full=full))
        elif index % 5 == 4:
            # Rank 0 makes about twenty calls in a save, rank 1 three. The calls of the first save are skipped.
            nth = chance.randrange(20, 60) if victim == 0 and not full else chance.randrange(13, 40)
            nth = nth if victim == 0 else chance.randrange(5, 15)
            drawn.append(
                Moment(f"before call {nth}", step, label=".*", nth=nth, victim=victim, full=full and not victim)
            )
        else:
            named = named or chance.sample(named_moments(), k=len(named_moments()))
            drawn.append(named.pop())
    return drawn


def uninterrupted(api: str, folder: Path) -> list[float]:
    """The losses of a run that is never killed and never saves."""
    outcome = moments.run(folder, save=None, options=[f"--api={api}"])
    assert outcome.codes == [0, 0], outcome.outputs
    assert len(set(outcome.losses)) == STEPS
    return outcome.losses


def kill(api: str, moment: Moment, losses: list[float], folder: Path) -> str:
    """Kills a rank and runs again. Returns the name of the checkpoint from which the second run resumed.

    Args:
        api: value of the option ``--api``.
        moment: the moment and the rank to kill.
        losses: those of the uninterrupted run.
        folder: an empty folder.

    Raises:
        AssertionError: if a checkpoint was lost or damaged, or if the second run differs from the uninterrupted one.
    """
    checkpoints, options = folder / "checkpoints", [f"--api={api}"]
    first = moments.run(folder / "first", save=checkpoints, full=moment.full, moment=moment, options=options)
    assert first.codes[moment.victim] == -9, first.outputs
    assert None not in first.codes, f"a survivor hung: {first.outputs[1 - moment.victim]}"

    # Every folder with the name of a checkpoint is complete, and the announced checkpoint exists.
    whole = whole_checkpoints(checkpoints)
    announced = (checkpoints / "newest").read_text()
    assert announced in whole
    before = EVERY if moment.label == ".*" else moment.step - EVERY
    assert announced >= f"step-{before:06}"

    second = moments.run(folder / "second", save=checkpoints, full=moment.full, options=options)
    assert second.codes == [0, 0], second.outputs
    assert f"{checkpoints / announced}: {int(announced[5:])} steps are done" in _resumed_from(second)
    assert second.losses == losses

    # No temporary file remains, and all checkpoints to keep exist. If the run was killed after its last save, no later
    # save has removed the oldest one.
    there = {path.name for path in checkpoints.iterdir()}
    spare = {"step-000002"} if announced == "step-000006" else set()
    assert there - spare == {"newest", "step-000004", "step-000006"}
    assert whole_checkpoints(checkpoints)[-2:] == ["step-000004", "step-000006"]
    return announced


def whole_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints. Checks that the files of each are complete and unchanged."""
    found = []
    for checkpoint in sorted(folder.glob("step-*")):
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, seal in listed.items():
            contents = (checkpoint / name).read_bytes()
            assert (len(contents), hashlib.sha256(contents).hexdigest()) == (seal["bytes"], seal["sha256"]), name
        assert {path.name for path in checkpoint.iterdir()} == {*listed, "manifest.json"}
        found.append(checkpoint.name)
    return found


def _resumed_from(outcome: Outcome) -> str:
    lines = [line for line in outcome.outputs[0].splitlines() if line.startswith("resume ")]
    assert len(lines) == 1, lines
    return lines[0]


def row_of(api: str, moment: Moment, losses: list[float]) -> dict[str, Any]:
    """An entry of the record."""
    form = "full" if moment.full else "sharded"
    row = {"api": api, "moment": moment.name, "save of step": moment.step, "rank": moment.victim, "form": form}
    with tempfile.TemporaryDirectory() as folder:
        try:
            row["went on from"] = kill(api, moment, losses, Path(folder))
        except AssertionError as error:
            row["wrong"] = str(error)[-2000:]
    print(row, flush=True)
    return row


def main() -> int:
    """Returns the number of kills with a wrong result."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.kills")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--number", type=int, default=NUM_RECORDED, help="moments, with each API")
    parser.add_argument("--at-once", type=int, default=3, help="that run at the same time")
    options = parser.parse_args()
    begun, rows = time.monotonic(), []
    for seed, api in enumerate(APIS, start=1):
        with tempfile.TemporaryDirectory() as folder:
            losses = uninterrupted(api, Path(folder) / "work")
        with ThreadPoolExecutor(options.at_once) as threads:
            rows += threads.map(partial(row_of, api, losses=losses), drawn_moments(options.number, seed))
    if options.record:
        # Imported here because ranks import this module too, and do not need the benchmarks.
        from spec_tools.benchmarks.page import circumstances

        lines = ",\n  ".join(map(json.dumps, rows))
        head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        RECORD.write_text(f'{head},\n "kills": [\n  {lines}\n ]\n}}\n')
    return sum("wrong" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
