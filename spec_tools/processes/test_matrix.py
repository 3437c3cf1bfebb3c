"""Each fault of a rank at each stage: the other ranks end with a report, and the restarted job continues."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spec_tools.processes import matrix
from spec_tools.processes.faults import FAULTS, whole_checkpoints
from spec_tools.processes.matrix import VICTIMS, Cell
from spec_tools.processes.stages import APIS, STAGES

pytestmark = pytest.mark.pure


@pytest.mark.spec("LEDGER-09", "LEDGER-02", "LEDGER-05", "FAULT-01", "FAULT-02", "FAULT-03")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_other_ranks_end_in_time_and_the_job_continues(fault: str) -> None:
    """Two faults at each stage. APIs, shardings, victims and hosts of the store alternate.

    All: ``python -m spec_tools.processes faults``.
    """
    number = FAULTS.index(fault)
    cells = [
        Cell(
            APIS[(number + of_stage) % 2],
            "hybrid" if (number + 2 * of_stage) % 5 == 0 else "full",
            VICTIMS[(number + of_stage // 2) % 2],
            fault,
            stage,
            hosts=(2 * number + of_stage) % 9 == 0,
        )
        for of_stage, stage in enumerate(STAGES)
        if (of_stage - number) % len(FAULTS) in (0, 2)
    ]
    # Waiting ranks use no CPU time, so some cells run at once.
    with ThreadPoolExecutor(6) as threads:
        rows = list(threads.map(matrix.run, cells))
    assert [row for row in rows if "problem" in row] == []


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
