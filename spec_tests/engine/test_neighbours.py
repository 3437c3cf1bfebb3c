"""Detects whether another rank's process on the same machine has ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minifsdp.ledger import neighbours
from minifsdp.ledger.neighbours import is_over, this_process
from spec_tests.waiting import comes_true

pytestmark = pytest.mark.pure


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that prints its machine and process ID, and then sleeps."""
    # Import the module alone, because the package would import torch.
    program = "import neighbours, time; print(*neighbours.this_process(), flush=True); time.sleep(60)"
    folder = Path(neighbours.__file__).parent
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=folder) as it:
        yield it
        it.kill()


@pytest.mark.spec("LEDGER-18")
def test_a_process_of_this_machine_is_over_as_soon_as_it_was_killed(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    machine, _, number = other.stdout.readline().strip().rpartition(" ")
    assert [machine, number] == [this_process()[0], str(other.pid)]
    assert not is_over([machine, number]) and not is_over(this_process())
    other.kill()
    # The parent process has not read the exit status yet, so the system still lists the process.
    assert comes_true(lambda: is_over([machine, number]))
    assert other.returncode is None
    other.wait()
    assert is_over([machine, number])


@pytest.mark.spec("LEDGER-18")
def test_nothing_is_said_of_a_process_of_another_machine() -> None:
    machine, _ = this_process()
    nobody = str(2**22 + 1)  # Linux never assigns such a high process ID
    assert is_over([machine, nobody])
    assert not is_over([f"another {machine}", nobody])


@pytest.mark.spec("LEDGER-18")
def test_nothing_is_said_where_the_system_does_not_tell_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_SYSTEM", tmp_path)
    assert this_process()[0] == ""
    assert not is_over(this_process())


@pytest.mark.spec("LEDGER-18")
def test_a_name_with_spaces_and_parentheses_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = this_process()
    monkeypatch.setattr(neighbours, "this_process", lambda: process)
    monkeypatch.setattr(neighbours, "_SYSTEM", tmp_path)
    (tmp_path / process[1]).mkdir()
    for state, over in {"S": False, "T": False, "Z": True, "X": True}.items():
        (tmp_path / process[1] / "stat").write_text(f"{process[1]} (a Z) Z) {state} 1 2 3")
        assert is_over(process) is over
