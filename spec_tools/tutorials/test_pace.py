"""train_gpt prints an estimate of its running time as soon as it can."""

from __future__ import annotations

from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
pytestmark = pytest.mark.pure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the report reads. The test sets it."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    from gpt import report

    now = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    return now


def advance(clock: list[float], num_steps: int, num_done: int = 0) -> None:
    """Runs all steps: the first takes 10 seconds, each other step half a second."""
    from gpt.report import Progress

    progress = Progress(num_steps, num_done, 100, shown=True)
    for step in range(num_done, num_steps):
        clock[0] += 10.0 if step == num_done else 0.5
        progress.advance(step, 1.0)


def estimates(printed: str) -> list[str]:
    return [line.split(None, 2)[2] for line in printed.splitlines() if line.startswith("will take")]


@pytest.mark.parametrize("num_done", [0, 40])
def test_remaining_time_is_estimated_without_first_step(
    clock: list[float], capsys: pytest.CaptureFixture[str], num_done: int
) -> None:
    advance(clock, num_done + 86, num_done)
    # After 6 steps, 80 are left.
    (said,) = estimates(capsys.readouterr().out)
    assert said.startswith("about 40 seconds more, as fast as steps 2 to 6 of this run; longer if other programs")


def test_run_that_ends_early_prints_no_estimate(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    advance(clock, 6)
    assert estimates(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "a second"), (7.6, "8 seconds"), (52, "50 seconds"), (170, "3 minutes")]
)
def test_duration_has_no_more_digits_than_an_estimate(clock: list[float], seconds: float, said: str) -> None:
    from gpt.report import duration

    assert duration(seconds) == said


def test_report_begins_with_the_load_of_the_machine(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt import report

    monkeypatch.setattr(report.os, "getloadavg", lambda: (0.26, 0.0, 0.0))
    monkeypatch.setattr(report.os, "cpu_count", lambda: 2)
    assert report.machine_now() == "2 cores, load 0.3 before this run"
    monkeypatch.delattr(report.os, "getloadavg")
    assert report.machine_now() == "2 cores"
