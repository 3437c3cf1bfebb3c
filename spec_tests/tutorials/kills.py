"""``python -m spec_tests.tutorials.kills``: kill -9 at 50 moments of a save through each door; ``--record`` keeps them.

Each has two runs. In the first a rank is killed. Then the folder is looked at, with eyes of its own and not with those
of the code under test; then the second run continues. Its curve must be that of a run that was never interrupted and
never saved anything, to the last bit.
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

from spec_tests.tutorials import killing
from spec_tests.tutorials.killing import EVERY, STEPS, Moment, Outcome

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "kills.json"
APIS = ("wrapper", "fully_shard")
NUM_RECORDED = 50  # moments, through each door
SLOWEST_SAVE = 0.12  # seconds; timed moments lie before


def named_moments() -> list[Moment]:
    """The moments that the protocol of `checkpoint` tells apart, in the order of a save."""
    part, file = r"\.step-{step}\.part", r"\.step-{step}\.part/(__\d_0\.distcp|full\.pt)"
    named = [
        # Rank 1 has no file of its own in the full form.
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
    # The pointer is written by every save; of those calls, the one of this save.
    nth = moment.nth if "step" in moment.label or "remove" in moment.label else moment.step // EVERY - 1
    return Moment(**{**vars(moment), "label": moment.label.replace("{step}", f"{moment.step:06}"), "nth": nth})


def drawn_moments(number: int, seed: int = 1) -> list[Moment]:
    """Of every five: three named ones, one after some milliseconds, one before some call out of all calls."""
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
            # Rank 0 makes some twenty calls in a save, rank 1 three. Those of the first save are not counted.
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
    """The losses of a run that is never killed and saves nothing."""
    outcome = killing.run(folder, save=None, options=[f"--api={api}"])
    assert outcome.codes == [0, 0], outcome.outputs
    assert len(set(outcome.losses)) == STEPS
    return outcome.losses


def kill(api: str, moment: Moment, losses: list[float], folder: Path) -> str:
    """Kills a rank, and runs again; returns the name of the checkpoint from which that went on.

    Args:
        api: the door.
        moment: when to kill whom.
        losses: of the run that was never interrupted.
        folder: an empty one.

    Raises:
        AssertionError: a checkpoint was lost or damaged, or the second run was not as if nothing had happened.
    """
    shelf, options = folder / "shelf", [f"--api={api}"]
    first = killing.run(folder / "first", save=shelf, full=moment.full, moment=moment, options=options)
    assert first.codes[moment.victim] == -9, first.outputs
    assert None not in first.codes, f"a survivor hung: {first.outputs[1 - moment.victim]}"

    # Whatever has its name is whole; and what was announced is there.
    whole = whole_checkpoints(shelf)
    announced = (shelf / "newest").read_text()
    assert announced in whole
    before = EVERY if moment.label == ".*" else moment.step - EVERY
    assert announced >= f"step-{before:06}"

    second = killing.run(folder / "second", save=shelf, full=moment.full, options=options)
    assert second.codes == [0, 0], second.outputs
    assert f"{shelf / announced}: {int(announced[5:])} steps are done" in _resumed_from(second)
    assert second.losses == losses

    # Nothing is left behind, and all that was to be kept is kept. Where the run was killed after its last save, there
    # was no further one that would have removed what is too old.
    there = {path.name for path in shelf.iterdir()}
    spare = {"step-000002"} if announced == "step-000006" else set()
    assert there - spare == {"newest", "step-000004", "step-000006"}
    assert whole_checkpoints(shelf)[-2:] == ["step-000004", "step-000006"]
    return announced


def whole_checkpoints(folder: Path) -> list[str]:
    """Names of those whose files are all there and unchanged."""
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
    """For the record."""
    form = "full" if moment.full else "sharded"
    row = {"door": api, "moment": moment.name, "save of step": moment.step, "rank": moment.victim, "form": form}
    with tempfile.TemporaryDirectory() as folder:
        try:
            row["went on from"] = kill(api, moment, losses, Path(folder))
        except AssertionError as error:
            row["wrong"] = str(error)[-2000:]
    print(row, flush=True)
    return row


def main() -> int:
    """How many were not as they should be."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.tutorials.kills")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--number", type=int, default=NUM_RECORDED, help="moments, through each door")
    parser.add_argument("--at-once", type=int, default=3, help="that run at the same time")
    options = parser.parse_args()
    begun, rows = time.monotonic(), []
    for seed, api in enumerate(APIS, start=1):
        with tempfile.TemporaryDirectory() as folder:
            losses = uninterrupted(api, Path(folder) / "work")
        with ThreadPoolExecutor(options.at_once) as threads:
            rows += threads.map(partial(row_of, api, losses=losses), drawn_moments(options.number, seed))
    if options.record:
        # Not at the beginning: ranks import this module, too, and have no use for the benchmarks.
        from spec_tests.benchmarks.page import circumstances

        lines = ",\n  ".join(map(json.dumps, rows))
        head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        RECORD.write_text(f'{head},\n "kills": [\n  {lines}\n ]\n}}\n')
    return sum("wrong" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
