"""A rank that is killed in a save, or fails under torchrun: the job continues from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_tools.processes import kills
from spec_tools.processes.ranks import start


@pytest.mark.pure
@pytest.mark.spec("FAULT-04")
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("case", [*kills.kills()], ids=str)
def test_rank_killed_in_a_save_loses_at_most_the_steps_since_the_previous_save(
    case: kills.Case, tmp_path: Path
) -> None:
    kills.resume(case, tmp_path)


@pytest.mark.pure
@pytest.mark.spec("FAULT-04")
def test_a_checkpoint_gets_its_name_after_its_files_are_on_the_disk(tmp_path: Path) -> None:
    """The test above fails if a moment never occurs, but not if a moment is in the wrong place."""
    with start("spec_tools.processes.train", str(tmp_path), "sharded", "[]", folder=tmp_path / "out") as ranks:
        assert ranks.wait(kills.LIMIT) == [0, 0], ranks.all_errors()
    of_all = [(tmp_path / f"events-{rank}").read_text().splitlines() for rank in range(2)]
    save = of_all[0][of_all[0].index("save 6") :]
    order = [
        "mkdir .step-000006.part",
        "fsync .step-000006.part/.manifest.json.part",
        "rename .step-000006.part/manifest.json",
        "rename step-000006",
        "rename newest",
        "rename .step-000002.old",
        "remove a file",
    ]
    remaining = iter(save)
    assert all(event in remaining for event in order), save
    # Each occurs only once: a pointer that is also written too early would be an error.
    assert all(save.count(event) == 1 for event in order[3:6])
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "progress.pt"):
        assert any(f"fsync .step-000006.part/{file}" in events for events in of_all), file


@pytest.mark.pure
@pytest.mark.spec("LEDGER-10", "HEALTHY-11")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("case", [*kills.restarts()], ids=str)
def test_job_under_torchrun_resumes_from_last_checkpoint(case: kills.Case, tmp_path: Path) -> None:
    kills.restart(case, tmp_path)
