"""A checkout can have any name and location, and the user need not have a home folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure

# The old spelling of a name warns, and the warning names the file and the line that uses it.
CALL = '    warn("the text")'
PROGRAM = """
import warnings
from minifsdp.engine.messages import warn

def old_spelling():
    warn("the text")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    old_spelling()
print(caught[0].filename, caught[0].lineno, sep=":")
"""


@pytest.mark.spec("START-01")
@pytest.mark.parametrize("program", ["train.py", "torchtrain/minifsdp_train.py"])
def test_a_warning_names_the_program_in_a_checkout_with_the_name_of_the_package(program: str, tmp_path: Path) -> None:
    checkout = tmp_path / "with space \u00e9" / "minifsdp"
    for name in ("minifsdp", "minifsdp_gloo"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    script = checkout / program
    script.parent.mkdir(exist_ok=True)
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONIOENCODING": "utf-8"}
    environment.pop("HOME", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=checkout, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == f"{script}:{1 + PROGRAM.splitlines().index(CALL)}"
