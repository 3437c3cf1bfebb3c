"""The hunt: the same seed tries the same cases, and a hunt that is ended leaves no process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest

from spec_tests.waiting import comes_true
from spec_tools.hunt.__main__ import hunt
from spec_tools.hunt.generators import GENERATORS, Generator
from spec_tools.tests.test_session import ROOT, is_running

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_same_seed_draws_the_same_cases_of_every_kind_and_another_seed_draws_others(tmp_path: pathlib.Path) -> None:
    def cases(seed: int, folder: pathlib.Path) -> list[str]:
        seen: list[str] = []

        def note(texts: list[str]) -> list[str | None]:
            seen.extend(texts)
            return [None] * len(texts)

        for name, generator in GENERATORS.items():
            assert hunt({name: replace(generator, findings=note)}, 0.0, seed, folder) == []
        return seen

    assert cases(1, tmp_path) == cases(1, tmp_path)
    assert cases(1, tmp_path) != cases(2, tmp_path)
    assert list(tmp_path.iterdir()) == [], "no file without a finding"


@pytest.mark.parametrize("found", [None, "a difference"])
def test_hunt_writes_a_file_for_each_finding(found: str | None, tmp_path: pathlib.Path) -> None:
    generator = Generator(lambda seed: ['{"number": 1}'], lambda texts: [found], lambda text: text)
    files = hunt({"runs": generator}, 0.0, 1, tmp_path)
    assert [json.loads(file.read_text())["found"] for file in files] == ([found] if found else [])
    assert list(tmp_path.iterdir()) == files


@pytest.mark.ranks
def test_terminated_hunt_prints_cases_and_leaves_no_process(tmp_path: pathlib.Path) -> None:
    """The scenarios' process is ended while it runs its cases."""
    arguments = ("--minutes", "9", "--seed", "1", "--only", "scenarios-fsdp1", "--folder", str(tmp_path))
    command = [sys.executable, "-m", "spec_tools.hunt", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as hunting:
        assert hunting.stdout is not None
        assert hunting.stdout.readline() == "seed 1\n"
        while not (ranks := descendants(hunting.pid)):
            assert hunting.poll() is None
        hunting.terminate()
        said, _ = hunting.communicate(timeout=60)
    assert said.splitlines()[0] == "stopped"
    assert "0 findings" in said
    assert comes_true(lambda: not any(is_running(pid) for pid in ranks), 60)


def descendants(pid: int) -> list[int]:
    """The descendant processes of a process."""
    listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, listed) for found in (child, *descendants(child))]
