"""The section "Break it" of the learning pages: a test fails after the change of each line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT

PAGE = (ROOT / "docs" / "learn" / "index.md").read_text(encoding="utf-8").partition("## Break it")[2]
# Module, line, replacement, test file and test: the worked example, which the page explains in words, and its table.
EXAMPLE = (
    "engine/hooks.py",
    "if unit.policy.reshard_after_forward and not unit.is_held:",
    "if False:",
    "spec_tests/sharding/test_strategies.py",
    "test_full_shard_all_gathers_twice_and_reduces_once",
)
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \| `(.+)` \| `(.+)`, `(.+)` \|$", PAGE, re.MULTILINE)


def test_page_has_a_worked_example_and_three_lines_that_exist_once() -> None:
    assert all(words in PAGE for words in EXAMPLE)
    assert len(ROWS) == 3
    for module, line, *_ in [EXAMPLE, *ROWS]:
        assert (ROOT / "minifsdp" / module).read_text(encoding="utf-8").count(line) == 1


@pytest.mark.docs
@pytest.mark.parametrize(("module", "line", "instead", "file", "test"), [EXAMPLE, *ROWS])
def test_named_test_fails_after_the_change_of_the_line(
    tmp_path: Path, module: str, line: str, instead: str, file: str, test: str
) -> None:
    for name in ("minifsdp", "minifsdp_gloo", "minifsdp_tools", "spec_tests", "spec_tools", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    source = tmp_path / "minifsdp" / module
    source.write_text(source.read_text(encoding="utf-8").replace(line, instead), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"{file}::{test}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    # All variants of the test fail.
    assert re.search(r"^\d+ failed in", done.stdout, re.MULTILINE), done.stdout + done.stderr
