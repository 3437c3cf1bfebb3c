"""The scripts of the page "Use it with your model" run as they are, and resume."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "use-it.md").read_text(encoding="utf-8")
SCRIPTS = dict(zip(("fully_shard", "wrapper"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))


def losses(script: str, folder: Path) -> list[str]:
    """The lines that the script prints, on two ranks."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("api", SCRIPTS)
def test_the_script_trains_and_resumes(api: str, tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    expected = losses(SCRIPTS[api], once)
    assert [line.partition(":")[0] for line in expected] == ["epoch 1", "epoch 2"]
    assert "NUM_EPOCHS = 2" in SCRIPTS[api]
    first = losses(SCRIPTS[api].replace("NUM_EPOCHS = 2", "NUM_EPOCHS = 1"), twice)
    # The second run loads the weights and the optimizer state of the first one.
    assert first + losses(SCRIPTS[api], twice) == expected
