"""Each fault of a rank at each stage: the other ranks end with a report, and the restarted job continues."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spec_tools.processes import matrix
from spec_tools.processes.faults import whole_checkpoints

pytestmark = pytest.mark.pure
GROUPS = matrix.groups()


@pytest.mark.spec("LEDGER-09", "LEDGER-02", "LEDGER-05", "FAULT-01", "FAULT-02", "FAULT-03")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("group", GROUPS)
def test_other_ranks_end_in_time_and_the_job_continues(group: str) -> None:
    # Waiting ranks use no CPU time, so some cells run at once.
    with ThreadPoolExecutor(6) as threads:
        problems = list(threads.map(matrix.problem_of, GROUPS[group]))
    assert [problem for problem in problems if problem] == []


@pytest.mark.spec("FAULT-01")
def test_a_damaged_or_incomplete_checkpoint_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "data").write_bytes(b"1234")
    seal = {"bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"data": seal}}))
    assert whole_checkpoints(tmp_path) == ["step-000001"]
    (folder / "data").write_bytes(b"1235")
    with pytest.raises(AssertionError, match="data of step-000001 is damaged"):
        whole_checkpoints(tmp_path)
    (folder / "data").unlink()
    with pytest.raises(AssertionError, match="step-000001"):
        whole_checkpoints(tmp_path)
