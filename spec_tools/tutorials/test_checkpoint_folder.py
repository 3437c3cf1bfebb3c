"""The folder of checkpoints: which ones it keeps, accepts and refuses. All ranks must agree."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks
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
    return on_first_rank(lambda: sorted(path.name for path in root.iterdir()))


def change(action: Callable[[], Any]) -> None:
    """Rank 0 changes the folder, and the other ranks wait until it is done."""
    on_first_rank(lambda: (action(), None)[1])


def newest(checkpoints: CheckpointFolder) -> tuple[str, list[str]]:
    """The chosen checkpoint, and the remarks about others. They must be the same on every rank, except its number."""
    said: list[str] = []
    name = checkpoints.newest(said.append).folder.name
    plain = [re.sub(r"^rank \d: ", "", text) for text in said]
    for theirs in from_all_ranks((name, plain)):
        assert theirs == (name, plain)
    return name, plain


# --- saving ---


@ranks(2)
def test_newest_two_checkpoints_are_kept_and_greater_step_numbers_are_not_removed(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30, 90, keep=9)
    filled(tmp_path, 40, keep=2)

    assert on_disk(tmp_path) == ["newest", "step-000030", "step-000040", "step-000090"]
    assert newest(CheckpointFolder(tmp_path))[0] == "step-000040"


@ranks(2)
def test_old_checkpoints_are_removed_only_after_the_new_one_is_announced(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, keep=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "_hide", _fail_to_hide)
        with pytest.raises(RuntimeError, match="rank 0: OSError: newest is step-000003"):
            filled(tmp_path, 3, keep=2)

    assert newest(CheckpointFolder(tmp_path)) == ("step-000003", [])


def _fail_to_hide(checkpoints: CheckpointFolder, folder: Path) -> None:
    raise OSError(f"newest is {(checkpoints.root / 'newest').read_text()}")


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


# --- checking ---


def truncate(folder: Path) -> None:
    os.truncate(folder / "part-1", 400)


def flip_a_bit(folder: Path) -> None:
    (folder / "part-1").write_bytes(b"\1" * 500 + b"\3" + b"\1" * 499)


def lose_a_file(folder: Path) -> None:
    (folder / "part-0").unlink()


def truncate_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 50)


def lie_in_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"number": 2', '"number": 3'))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (truncate, r"file part-1, key bytes: expected 1000, found 400 \(rank 0, 1\)"),
        (flip_a_bit, r"file part-1, key sha256: expected [0-9a-f]{64}, found [0-9a-f]{64} \(rank 1\)"),
        (lose_a_file, r"file part-0, key file: expected 1000 bytes, found No such file or directory \(rank 0, 1\)"),
        (truncate_the_manifest, r"file manifest.json, key contents: expected .*, found JSONDecodeError"),
        (lie_in_the_manifest, r"file manifest.json, key seal: expected [0-9a-f]{64}, found [0-9a-f]{64}"),
        (shutil.rmtree, r"file manifest.json, key file: expected .*, found No such file or directory"),
    ],
)
@ranks(2)
def test_damaged_newest_checkpoint_is_refused_and_the_previous_one_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
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


# --- choosing ---


@ranks(2)
def test_new_run_must_not_save_in_folder_of_other_run(tmp_path: Path) -> None:
    filled(tmp_path / "a", 100)
    filled(tmp_path / "b", 100)
    for resume in (None, tmp_path / "b", tmp_path / "b" / "step-000100"):
        with pytest.raises(CheckpointError, match=r"found step-000100. Add --resume .*/a, or save to another folder"):
            choose(resume, tmp_path / "a", pytest.fail)


# --- acting together ---
