"""Checkpoints from untrusted sources, a second job in the same folder, and limits of the machine."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from spec_tests.harness import ranks
from spec_tests.waiting import comes_true
from spec_tools.tutorials.test_save_resume import FIXED, NOTED, assert_equal, fresh, whole

# isort: split
from gpt import manifest
from gpt.checkpoint import CheckpointFolder
from gpt.ranks import from_all_ranks, on_first_rank
from gpt.resume import resume, save


class Attack:
    """Runs a command when it is unpickled, here to create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def sealed_again(folder: Path) -> None:
    """Updates the checksums. Any program that can write a checkpoint can do this."""
    path = folder / manifest.MANIFEST
    facts = json.loads(path.read_bytes())
    facts.pop("seal")
    facts["files"] = {name: manifest.seal_of(folder / name) for name in facts["files"]}
    path.write_bytes(manifest.sealed(facts))


def attacked(folder: Path, file: str, mark: Path) -> None:
    path = folder / file
    if file == ".metadata":
        whole_metadata = pickle.loads(path.read_bytes())
        whole_metadata.planner_data["attack"] = Attack(mark)
        path.write_bytes(pickle.dumps(whole_metadata))
    else:
        torch.save(Attack(mark), path)
    sealed_again(folder)


@pytest.mark.spec("SAVE-04")
@pytest.mark.parametrize("file", [".metadata", "progress.pt", "full.pt"])
@ranks(2)
def test_code_in_a_checkpoint_with_valid_checksums_does_not_run(tmp_path: Path, file: str) -> None:
    folder = save(CheckpointFolder(tmp_path / "runs"), fresh(), fixed=FIXED, noted=NOTED, full=file == "full.pt")
    mark = tmp_path / "mark"
    on_first_rank(lambda: attacked(folder, file, mark))
    training = fresh()
    before = whole(training)
    checkpoint = CheckpointFolder(tmp_path / "runs").newest(pytest.fail)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: UnpicklingError: .*system.*rank 1: UnpicklingError"):
        resume(checkpoint, training, fixed=FIXED, noted=NOTED)
    assert not mark.exists()
    assert_equal(whole(training), before)


def write(folder: Path) -> None:
    (folder / f"part-{dist.get_rank()}").write_bytes(bytes(1000))


@pytest.mark.spec("SAVE-05")
@pytest.mark.parametrize("contents", ["[" * 100_000, '{"a":' * 100_000, '{"seal":' + "[" * 900 + "]" * 900 + "}"])
@ranks(2)
def test_a_manifest_that_is_nested_too_deeply_is_damaged(tmp_path: Path, contents: str) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, {}, write)
    checkpoints.save(2, {}, write)
    on_first_rank(lambda: (tmp_path / "step-000002" / "manifest.json").write_text(contents))
    said: list[str] = []
    assert checkpoints.newest(said.append).step == 1
    assert "manifest.json" in said[0]


HOLDER = """
import fcntl, os, sys
number = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(number, fcntl.LOCK_EX)
open(sys.argv[2], "w").close()
sys.stdin.read()
"""


@pytest.mark.spec("SAVE-06")
@ranks(2)
def test_second_saving_job_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    checkpoints, ready = CheckpointFolder(tmp_path / "runs"), tmp_path / "ready"
    checkpoints.save(1, {}, write)
    part = checkpoints.root / ".step-000002.part"
    process = None
    if dist.get_rank() == 0:
        part.mkdir()
        command = [sys.executable, "-c", HOLDER, str(checkpoints.root), str(ready)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert comes_true(ready.exists, limit=60)
    from_all_ranks(None)
    for call in (checkpoints.tidy, lambda: checkpoints.save(2, {}, write)):
        with pytest.raises(RuntimeError, match=r"another job writes checkpoints to .*runs"):
            call()
    assert part.is_dir()
    from_all_ranks(None)
    if process is not None:
        process.kill()  # As by `kill -9`: the lock ends with the process.
        process.wait()
    from_all_ranks(None)
    checkpoints.save(2, {}, write)
    assert checkpoints.newest(pytest.fail).step == 2


@pytest.mark.spec("SAVE-07")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@ranks(2)
def test_rank_that_exceeds_a_file_size_limit_names_the_limit(tmp_path: Path, full: bool) -> None:
    limited, limit = (0 if full else 1), 2**20
    large = {f"large {dist.get_rank()}": torch.zeros(limit)}  # 4 MiB

    def write_large(folder: Path) -> None:
        if full:
            on_first_rank(lambda: torch.save(large, folder / "full.pt"))
        else:
            dcp.save(large, storage_writer=dcp.FileSystemWriter(folder))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises((RuntimeError, dcp.CheckpointException)) as error:
            CheckpointFolder(tmp_path).save(1, {}, write_large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    named = f"rank {limited}: this rank cannot write files larger than {limit} bytes (RLIMIT_FSIZE"
    assert (named in str(error.value)) == (dist.get_rank() == limited), str(error.value)


@pytest.mark.spec("SAVE-08")
@ranks(2)
def test_a_leftover_that_is_a_symbolic_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    checkpoints, elsewhere = CheckpointFolder(tmp_path / "runs", keep=1), tmp_path / "elsewhere"
    checkpoints.save(1, {}, write)

    def link() -> None:
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
        (checkpoints.root / ".step-000002.part").symlink_to(elsewhere)
        (checkpoints.root / ".newest.part").symlink_to(elsewhere)
        (checkpoints.root / "step-000002").symlink_to(elsewhere)
        (checkpoints.root / "step-000000").symlink_to(elsewhere)

    on_first_rank(link)
    checkpoints.save(2, {}, write)
    assert on_first_rank(lambda: sorted(os.listdir(checkpoints.root))) == ["newest", "step-000002"]
    assert (elsewhere / "mine").read_text() == "mine"


@pytest.mark.spec("SAVE-08")
@ranks(2)
def test_a_folder_called_newest_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, {}, write)

    def replace() -> None:
        (tmp_path / "newest").unlink()
        (tmp_path / "newest").mkdir()

    on_first_rank(replace)
    assert checkpoints.newest(pytest.fail).step == 1
    for call in (checkpoints.tidy, lambda: checkpoints.save(2, {}, write)):
        with pytest.raises(RuntimeError, match=r"newest is a folder, .*Move it away"):
            call()
    assert (tmp_path / "newest").is_dir()
