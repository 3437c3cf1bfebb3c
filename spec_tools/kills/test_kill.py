"""Kill -9 of any rank at any moment of a save: the previous checkpoint is intact, and the run resumes from it.

Tests six random moments from a fixed seed, alternating between the two APIs. For fifty moments with each API, run
``python -m spec_tools.kills``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_tools.kills import __main__ as kills
from spec_tools.kills import moments
from spec_tools.kills.__main__ import APIS, NUM_RECORDED, drawn_moments
from spec_tools.kills.moments import Moment

NUM_MOMENTS = 6
DRAWN = [(APIS[number % 2], moment) for number, moment in enumerate(drawn_moments(NUM_MOMENTS))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return {api: kills.uninterrupted(api, tmp_path_factory.mktemp("kill") / "work") for api in APIS}


@pytest.mark.spec("FAULT-04")
@pytest.mark.parametrize(("api", "moment"), DRAWN, ids=str)
def test_rank_killed_during_a_save_loses_at_most_the_steps_since_the_previous_save(
    api: str, moment: Moment, uninterrupted: dict[str, list[float]], tmp_path: Path
) -> None:
    assert kills.kill(api, moment, uninterrupted[api], tmp_path).startswith("step-")


@pytest.mark.spec("FAULT-04")
def test_50_recorded_kills_with_each_api_lose_no_checkpoint() -> None:
    recorded = json.loads(kills.RECORD.read_text())["kills"]
    for seed, api in enumerate(APIS, start=1):
        rows = [row for row in recorded if row["api"] == api]
        moments = drawn_moments(NUM_RECORDED, seed)
        assert len(moments) == 50
        assert [(row["moment"], row["save of step"], row["rank"]) for row in rows] == [
            (moment.name, moment.step, moment.victim) for moment in moments
        ]
        assert all(row["went on from"] in ("step-000002", "step-000004", "step-000006") for row in rows)
        assert {row["form"] for row in rows} == {"full", "sharded"}


def test_named_moments_occur_in_a_real_save_in_this_order(tmp_path: Path) -> None:
    """The test above fails if a moment never occurs, but not if a moment is in the wrong place."""
    outcome = moments.run(tmp_path / "work", save=tmp_path / "checkpoints")
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
    # Each occurs only once: a pointer that is also written too early would be an error.
    assert all(save.count(call) == 1 for call in ("rename step-000006", "rename newest", "rename .step-000002.old"))
    # Some rank flushes every file, and the manifest is renamed only when all of them are on the disk.
    flushed = {call.removeprefix("fsync ") for rank in outcome.calls for call in rank if call.startswith("fsync ")}
    assert {
        f".step-000006.part/{name}" for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "progress.pt")
    } <= flushed
