"""A job trains without any observer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spec_tests.harness.programs import outcome_of_ranks

SCRIPT = Path(__file__).parent / "no_checks.py"


def lines(checks: str) -> list[str]:
    found = outcome_of_ranks(SCRIPT, num_ranks=2, environment={"MINIFSDP_CHECKS": checks}, limit=120)
    assert [code for code, _ in found] == [0, 0], found
    return [line for _, text in found for line in text.splitlines() if "observers:" in line]


@pytest.mark.spec("LEDGER-23")
@pytest.mark.pure
def test_job_without_checks_has_no_observer_and_the_same_losses() -> None:
    without, with_checks = lines("0"), lines("1")
    assert [re.sub("groups in the log: .*", "", line) for line in without] == [
        re.sub("groups in the log: .*", "", line) for line in with_checks
    ]
    assert all(line.endswith("groups in the log: 0 observers: 0") for line in without)
    assert all(line.endswith("groups in the log: 1 observers: 6") for line in with_checks)
