"""A process that has finished its work exits normally, even if gloo's threads are still active."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.pure
def test_ranks_that_leave_right_after_a_collective_end_with_status_0() -> None:
    # Without the pause at exit, about one exit in five ends with SIGABRT. Python must really shut down, and the
    # processes of the fork server never do that.
    done = subprocess.run(
        [sys.executable, "-m", "spec_tests.transport.leave", "8"],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
