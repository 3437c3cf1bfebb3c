"""Kill -9 of any rank at any moment of a save: the earlier checkpoint is intact, and the run continues from it.

Each test has two runs. In the first a rank is killed. Then the folder is looked at, with eyes of its own and not with
those of the code under test; then the second run continues. Its curve must be that of a run that was never interrupted
and never saved anything, to the last bit.

Five moments are drawn from a fixed seed. More of them, by hand or at night::

    MINIFSDP_KILL_MOMENTS=60 python -m pytest spec_tests/tutorials/test_kill.py
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from spec_tests.tutorials import killing
from spec_tests.tutorials.killing import EVERY, STEPS, Moment, Outcome

NUM_MOMENTS = int(os.environ.get("MINIFSDP_KILL_MOMENTS", "5"))
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


def drawn_moments(number: int) -> list[Moment]:
    """Of every five: three named ones, one after some milliseconds, one before some call out of all calls."""
    chance = random.Random(1)
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    outcome = killing.run(tmp_path_factory.mktemp("kill") / "work", save=None)
    assert outcome.codes == [0, 0], outcome.outputs
    assert len(set(outcome.losses)) == STEPS
    return outcome.losses


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


def resumed_from(outcome: Outcome) -> str:
    lines = [line for line in outcome.outputs[0].splitlines() if line.startswith("resume ")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("moment", drawn_moments(NUM_MOMENTS), ids=str)
def test_a_rank_killed_in_a_save_costs_at_most_the_steps_since_the_one_before(
    moment: Moment, uninterrupted: list[float], tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    first = killing.run(tmp_path / "first", save=shelf, full=moment.full, moment=moment)
    assert first.codes[moment.victim] == -9, first.outputs
    assert None not in first.codes, "a survivor hung"

    # Whatever has its name is whole; and what was announced is there.
    whole = whole_checkpoints(shelf)
    announced = (shelf / "newest").read_text()
    assert announced in whole
    before = EVERY if moment.label == ".*" else moment.step - EVERY
    assert announced >= f"step-{before:06}"

    second = killing.run(tmp_path / "second", save=shelf, full=moment.full)
    assert second.codes == [0, 0], second.outputs
    assert f"{shelf / announced}: {int(announced[5:])} steps are done" in resumed_from(second)
    assert second.losses == uninterrupted

    # Nothing is left behind, and all that was to be kept is kept. Where the run was killed after its last save, there
    # was no further one that would have removed what is too old.
    there = {path.name for path in shelf.iterdir()}
    spare = {"step-000002"} if announced == "step-000006" else set()
    assert there - spare == {"newest", "step-000004", "step-000006"}
    assert whole_checkpoints(shelf)[-2:] == ["step-000004", "step-000006"]


def test_the_named_moments_are_those_of_a_real_save_and_come_in_this_order(tmp_path: Path) -> None:
    """Else a moment that never comes would make the test above fail, but one at the wrong place would not."""
    outcome = killing.run(tmp_path / "work", save=tmp_path / "shelf")
    assert outcome.codes == [0, 0], outcome.outputs
    calls = outcome.calls[0]
    save = calls[calls.index("mkdir .step-000006.part") :]
    order = [
        "open .step-000006.part/__0_0.distcp",
        "fsync .step-000006.part/__0_0.distcp",
        "open .step-000006.part/.manifest.json.part",
        "fsync .step-000006.part/.manifest.json.part",
        "rename .step-000006.part/manifest.json",
        "fsync .step-000006.part",
        "rename step-000006",
        "fsync .",
        "open .newest.part",
        "fsync .newest.part",
        "rename newest",
        "fsync .",
        "rename .step-000002.old",
        "remove a file",
    ]
    remaining = iter(save)
    assert all(call in remaining for call in order), save
    # And no more often: a pointer that was also written too early would be as bad.
    assert all(save.count(call) == 1 for call in ("rename step-000006", "rename newest", "rename .step-000002.old"))
    # Every file, by some rank, and the manifest is renamed when all of them are on the disk.
    flushed = {call.removeprefix("fsync ") for rank in outcome.calls for call in rank if call.startswith("fsync ")}
    assert {
        f".step-000006.part/{name}" for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "progress.pt")
    } <= flushed
