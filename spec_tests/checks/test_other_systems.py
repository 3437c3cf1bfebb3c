"""The package trains on systems without the functions of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_tests.harness.programs import output_of_ranks


@pytest.mark.spec("START-11")
def test_models_train_without_proc_signals_and_forks() -> None:
    output = output_of_ranks(Path(__file__).parent / "other_system.py", num_ranks=2, environment={})

    lines = output.splitlines()
    losses = [line for line in lines if line.startswith("losses")]
    assert len(losses) == 3
    assert len(set(losses)) == 1, "both APIs train as one process"
    notes = [line for line in lines if "has no /proc-of-linux" in line]
    assert len(notes) == 1
    assert notes[0].startswith("rank 0:")
