"""The folder of checkpoints: which ones it keeps, accepts and refuses. All ranks must agree."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from spec_tests.harness import ranks
from spec_tests.waiting import comes_true
from tutorials.gpt import manifest
from tutorials.gpt.checkpoint import CheckpointFolder, choose
from tutorials.gpt.manifest import CheckpointError
from tutorials.gpt.ranks import from_all_ranks, on_first_rank


def write(folder: Path) -> None:
    """Each rank writes one file: 1000 bytes with the value of its rank."""
    (folder / f"part-{dist.get_rank()}").write_bytes(bytes([dist.get_rank()]) * 1000)


def filled(root: Path, *steps: int, keep: int = 10) -> CheckpointFolder:
    checkpoints = CheckpointFolder(root, keep)
    for step in steps:
        checkpoints.save(step, {"colour": "blue", "number": step}, write)
    return checkpoints


def on_disk(root: Path) -> list[str]:
    return on_first_rank(lambda: sorted(os.listdir(root)))


def change(action: Callable[[], Any]) -> None:
    """Rank 0 changes the folder, and the other ranks wait until it is done."""
    on_first_rank(lambda: (action(), None)[1])


def newest(checkpoints: CheckpointFolder) -> tuple[str, list[str]]:
    """The chosen checkpoint, and the remarks about others. They must be the same on every rank, except its number."""
    said: list[str] = []
    name = checkpoints.newest(said.append).folder.name
    found = name, [re.sub(r"^rank \d: ", "", text) for text in said]
    assert from_all_ranks(found) == [found] * dist.get_world_size()
    return found


# --- saving ---


@ranks(2)
def test_newest_two_checkpoints_are_kept_and_greater_step_numbers_are_not_removed(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30, 90, keep=9)
    filled(tmp_path, 40, keep=2)

    assert on_disk(tmp_path) == ["newest", "step-000030", "step-000040", "step-000090"]
    assert newest(CheckpointFolder(tmp_path))[0] == "step-000040"


@ranks(2)
def test_failed_write_on_one_rank_stops_all_ranks_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 1)

    def write_badly(folder: Path) -> None:
        write(folder)
        if dist.get_rank() == 1:
            os.remove(folder / "part-1")  # As another program could do.
            os.symlink("/proc/self/mem", folder / "part-1")  # A file that cannot be read.

    with pytest.raises(RuntimeError, match=r"rank \d: OSError"):
        checkpoints.save(2, {}, write_badly)
    assert newest(checkpoints) == ("step-000001", [])
    assert on_disk(tmp_path) == [".step-000002.part", "newest", "step-000001"]

    filled(tmp_path, 3)
    assert on_disk(tmp_path) == ["newest", "step-000001", "step-000003"]


@pytest.mark.spec("SAVE-07")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@ranks(2)
def test_rank_that_exceeds_a_file_size_limit_names_the_limit(tmp_path: Path, full: bool) -> None:
    # A full checkpoint is written by rank 0.
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


HOLDER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
open(sys.argv[2], "w").close()
sys.stdin.read()
"""


@pytest.mark.spec("SAVE-06")
@ranks(2)
def test_second_saving_job_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    checkpoints, ready = filled(tmp_path / "runs", 1), tmp_path / "ready"
    part = checkpoints.root / ".step-000002.part"
    command = [sys.executable, "-c", HOLDER, str(checkpoints.root), str(ready)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE) if dist.get_rank() == 0 else None
    change(part.mkdir)
    assert comes_true(ready.exists, limit=60)
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
    assert newest(checkpoints) == ("step-000002", [])


@pytest.mark.spec("SAVE-08")
@ranks(2)
def test_a_leftover_that_is_a_symbolic_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    checkpoints, elsewhere = filled(tmp_path / "runs", 1, keep=1), tmp_path / "elsewhere"

    def link() -> None:
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
        for name in (".step-000002.part", ".newest.part", "step-000002", "step-000000"):
            (checkpoints.root / name).symlink_to(elsewhere)

    on_first_rank(link)
    checkpoints.save(2, {}, write)
    assert on_disk(checkpoints.root) == ["newest", "step-000002"]
    assert (elsewhere / "mine").read_text() == "mine"


@pytest.mark.spec("SAVE-08")
@ranks(2)
def test_a_folder_called_newest_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    checkpoints, pointer = filled(tmp_path, 1), tmp_path / "newest"
    change(lambda: (pointer.unlink(), pointer.mkdir()))
    assert newest(checkpoints) == ("step-000001", [])
    for call in (checkpoints.tidy, lambda: checkpoints.save(2, {}, write)):
        with pytest.raises(RuntimeError, match=r"newest is a folder, .*Move it away"):
            call()
    assert pointer.is_dir()


# --- checking ---


def rewrite_manifest(change: Callable[[str], str]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(change(path.read_text()))

    return damage


UNREADABLE = r"file manifest.json, key contents: expected .*, found (JSONDecode|Recursion)Error"
# By name: an action on the folder of a checkpoint, and the problem that ranks report.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated file": (
        lambda folder: os.truncate(folder / "part-1", 400),
        r"file part-1, key bytes: expected 1000, found 400 \(rank 0, 1\)",
    ),
    "changed bit": (
        lambda folder: (folder / "part-1").write_bytes(b"\1" * 500 + b"\3" + b"\1" * 499),
        r"file part-1, key sha256: expected [0-9a-f]{64}, found [0-9a-f]{64} \(rank 1\)",
    ),
    "lost file": (
        lambda folder: (folder / "part-0").unlink(),
        r"file part-0, key file: expected 1000 bytes, found No such file or directory \(rank 0, 1\)",
    ),
    "lost folder": (shutil.rmtree, r"file manifest.json, key file: expected .*, found No such file or directory"),
    "truncated manifest": (rewrite_manifest(lambda text: text[:50]), UNREADABLE),
    "changed manifest": (
        rewrite_manifest(lambda text: text.replace('"number": 2', '"number": 3')),
        r"file manifest.json, key seal: expected [0-9a-f]{64}, found [0-9a-f]{64}",
    ),
    # A manifest that is nested too deeply.
    "many lists": (rewrite_manifest(lambda text: "[" * 100_000), UNREADABLE),
    "many dicts": (rewrite_manifest(lambda text: '{"a":' * 100_000), UNREADABLE),
    "nested seal": (rewrite_manifest(lambda text: '{"seal":' + "[" * 900 + "]" * 900 + "}"), "file manifest.json, "),
}


@pytest.mark.spec("SAVE-05")
@pytest.mark.parametrize("kind", DAMAGES)
@ranks(2)
def test_damaged_newest_checkpoint_is_refused_and_the_previous_one_is_loaded(tmp_path: Path, kind: str) -> None:
    damage, problem = DAMAGES[kind]
    checkpoints = filled(tmp_path, 1, 2)
    change(lambda: damage(tmp_path / "step-000002"))
    name, said = newest(checkpoints)
    assert name == "step-000001"
    assert len(said) == 1
    assert re.match(rf"{re.escape(str(tmp_path))}/step-000002 is refused: {problem}", said[0]), said
    with pytest.raises(CheckpointError, match=rf"rank {dist.get_rank()}: .*step-000002 is refused: {problem}"):
        choose(tmp_path / "step-000002", None, lambda text: None)


@ranks(2)
def test_error_on_one_rank_makes_all_ranks_refuse(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(manifest, "MANIFEST", "on another file system")
        with pytest.raises(CheckpointError, match=r"key file: .*\(rank 1\)"):
            checkpoints.newest(lambda text: None)


@pytest.mark.parametrize("pointer", [None, b"", b"step-", b"../elsewhere", b"\xff\xfe"])
@ranks(2)
def test_checkpoint_with_the_greatest_number_is_used_without_a_readable_pointer(
    tmp_path: Path, pointer: bytes | None
) -> None:
    filled(tmp_path, 1, 3, 2)
    path = tmp_path / "newest"
    change(lambda: path.unlink() if pointer is None else path.write_bytes(pointer))

    assert newest(CheckpointFolder(tmp_path)) == ("step-000003", [])


@ranks(2)
def test_new_run_must_not_save_in_folder_of_other_run(tmp_path: Path) -> None:
    filled(tmp_path / "a", 100)
    filled(tmp_path / "b", 100)
    for resume in (None, tmp_path / "b", tmp_path / "b" / "step-000100"):
        with pytest.raises(CheckpointError, match=r"found step-000100. Add --resume .*/a, or save to another folder"):
            choose(resume, tmp_path / "a", pytest.fail)
