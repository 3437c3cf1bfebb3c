"""Detects the end of another rank's process on the same machine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minifsdp.watchdog import linux
from minifsdp.watchdog.linux import another_thread_runs, has_ended, this_process
from minifsdp.watchdog.process import _let_threads_finish
from spec_tests.waiting import comes_true

pytestmark = pytest.mark.pure


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that prints its machine and process ID, and then sleeps."""
    program = "from minifsdp.watchdog import linux; print(*linux.this_process(), flush=True); input()"
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, cwd=root) as it:
        yield it
        it.kill()


@pytest.mark.spec("LEDGER-18")
def test_killed_process_of_this_machine_counts_as_ended_immediately(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    machine, _, number = other.stdout.readline().strip().rpartition(" ")
    assert [machine, number] == [this_process()[0], str(other.pid)]
    assert not has_ended([machine, number]) and not has_ended(this_process())
    other.kill()
    # The parent process has not read the exit status yet, so the system still lists the process.
    assert comes_true(lambda: has_ended([machine, number]))
    assert other.returncode is None
    other.wait()
    assert has_ended([machine, number])


@pytest.mark.spec("LEDGER-18")
def test_process_of_other_machine_is_not_reported_as_ended() -> None:
    machine, _ = this_process()
    nobody = str(2**22 + 1)  # Linux never assigns such a high process ID
    assert has_ended([machine, nobody])
    assert not has_ended([f"another {machine}", nobody])


@pytest.mark.spec("LEDGER-18")
def test_missing_proc_filesystem_gives_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "SYSTEM", tmp_path)
    assert this_process()[0] == ""
    assert not has_ended(this_process())


@pytest.mark.spec("LEDGER-18")
def test_a_name_with_spaces_and_parentheses_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = this_process()
    monkeypatch.setattr(linux, "this_process", lambda: process)
    monkeypatch.setattr(linux, "SYSTEM", tmp_path)
    (tmp_path / process[1]).mkdir()
    for state, over in {"S": False, "T": False, "Z": True, "X": True}.items():
        (tmp_path / process[1] / "stat").write_text(f"{process[1]} (a Z) Z) {state} 1 2 3")
        assert has_ended(process) is over


@pytest.mark.spec("HEALTHY-06")
def test_the_end_waits_for_threads_that_need_the_interpreter() -> None:
    """gloo's threads release tensors late on a machine with a high load, which must not happen during the shutdown."""
    has_ended = threading.Event()

    def computes() -> None:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        has_ended.set()

    threading.Thread(target=computes).start()
    _let_threads_finish()
    assert has_ended.is_set()
    assert comes_true(lambda: not another_thread_runs())


@pytest.mark.spec("HEALTHY-10")
def test_the_end_does_not_wait_for_a_thread_that_never_ends() -> None:
    is_over = threading.Event()

    def computes() -> None:
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=computes)
    thread.start()
    try:
        assert comes_true(another_thread_runs)
        _let_threads_finish()
    finally:
        is_over.set()
        thread.join()
