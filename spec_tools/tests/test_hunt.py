"""The hunt: it finds an inserted error, its file reproduces it, and the same seed tries the same cases."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from spec_tests.harness.programs import run_module
from spec_tests.random_programs.description import from_json, to_json
from spec_tests.waiting import comes_true
from spec_tools.hunt.__main__ import hunt, main
from spec_tools.hunt.generators import GENERATORS, Generator
from spec_tools.tests.test_random_programs import CARELESS
from spec_tools.tests.test_session import ROOT, is_running

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spec_tools.hunt", *arguments]


@pytest.mark.ranks
def test_hunt_finds_and_shrinks_an_error_and_replays_its_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = to_json(replace(CARELESS, api="fsdp1"))
    generator = replace(GENERATORS["runs-fsdp1"], draw=lambda seed: [right, to_json(CARELESS)])
    (file,) = hunt({"runs-fsdp1": generator}, 0.0, 17, tmp_path)
    said = capsys.readouterr().out
    assert said.startswith("seed 17\n")
    assert said.endswith(f"2 cases of runs-fsdp1\n       2 cases in all, 1 findings\n{file}\n")
    about = json.loads(file.read_text())
    assert from_json(json.dumps(about["as_drawn"])) == CARELESS
    assert about["case"] == {
        "model": {"kind": "chain", "children": [{"kind": "embedding", "unit": True, "times": 2}]},
        "api": "careless",
    }
    # The last test of this file starts the real command.
    again = run_module("spec_tools.hunt", "--replay", str(file), folder=ROOT, environment=ENVIRONMENT)
    assert again.returncode == 1, again.stderr
    assert again.stdout.strip() == about["found"].strip()


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


def test_unreproduced_finding_is_marked(tmp_path: pathlib.Path) -> None:
    answers = iter([["once"], [None]])
    generator = Generator(lambda seed: ['{"number":1}'], lambda texts: next(answers), lambda text: text)
    (file,) = hunt({"flaky": generator}, 0.0, 1, tmp_path)
    assert json.loads(file.read_text())["found"] == "Not seen again; at first:\nonce"


@pytest.mark.parametrize("found", [None, "something"])
def test_exit_status_shows_whether_hunt_found_error(
    found: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for name in GENERATORS:
        monkeypatch.setitem(GENERATORS, name, Generator(lambda seed: ["{}"], lambda texts: [found], lambda text: text))
    try:
        assert main(["--minutes", "0", "--folder", str(tmp_path)]) == int(found is not None)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.ranks
def test_terminated_hunt_prints_cases_and_leaves_no_process(tmp_path: pathlib.Path) -> None:
    """The scenarios' process is ended while it runs its cases."""
    arguments = ("--minutes", "9", "--seed", "1", "--only", "scenarios-fsdp1", "--folder", str(tmp_path))
    with subprocess.Popen(command(*arguments), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as hunting:
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
