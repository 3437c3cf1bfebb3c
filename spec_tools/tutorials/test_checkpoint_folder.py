"""The folder of checkpoints: which ones it keeps, accepts and refuses. All ranks must agree."""

from __future__ import annotations

import json
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
from tutorials.gpt.manifest import CheckpointError, Flaw, differences
from tutorials.gpt.ranks import from_all_ranks, on_first_rank, together


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
def test_saved_checkpoint_has_its_step_and_facts(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path / "deep" / "checkpoints", 7)
    found = checkpoints.newest(pytest.fail)

    assert (found.folder.name, found.step, found.facts) == ("step-000007", 7, {"colour": "blue", "number": 7})
    assert (found.folder / "part-1").read_bytes() == b"\1" * 1000
    listed = json.loads((found.folder / "manifest.json").read_text())["files"]
    assert {name: seal["bytes"] for name, seal in listed.items()} == {"part-0": 1000, "part-1": 1000}


@ranks(2)
def test_newest_two_checkpoints_are_kept_and_greater_step_numbers_are_not_removed(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30, 90, keep=9)
    filled(tmp_path, 40, keep=2)

    assert on_disk(tmp_path) == ["newest", "step-000030", "step-000040", "step-000090"]
    assert newest(CheckpointFolder(tmp_path))[0] == "step-000040"


@ranks(2)
def test_step_numbers_of_different_lengths_are_compared_as_numbers(tmp_path: Path) -> None:
    filled(tmp_path, 999_998, 999_999, 1_000_000, keep=2)

    assert on_disk(tmp_path) == ["newest", "step-1000000", "step-999999"]
    assert CheckpointFolder(tmp_path).candidates() == ["step-1000000", "step-999999"]


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


@ranks(2)
def test_tidy_removes_hidden_leftovers_and_keeps_named_checkpoints(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    change(lambda: (tmp_path / "step-000001").rename(tmp_path / ".step-000001.old"))
    change(lambda: (tmp_path / ".step-000009.part").mkdir())
    change(lambda: (tmp_path / ".newest.part").write_text("step-0"))
    CheckpointFolder(tmp_path, keep=1).tidy()
    CheckpointFolder(tmp_path / "not there").tidy()

    assert on_disk(tmp_path) == ["newest", "step-000002", "step-000003"]


@ranks(2)
def test_other_files_in_the_folder_are_not_removed(tmp_path: Path) -> None:
    others = ["notes.txt", ".step", "step-7", "step-000001.bak", ".step-000001.part.txt"]
    change(lambda: [(tmp_path / name).write_text("mine") for name in others])
    filled(tmp_path, 1, 2, 3, keep=1)

    assert set(on_disk(tmp_path)) == {*others, "newest", "step-000003"}


@pytest.mark.pure
def test_keeping_zero_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointFolder(Path("anywhere"), keep=0)


# --- checking ---


def truncate(folder: Path) -> None:
    os.truncate(folder / "part-1", 400)


def flip_a_bit(folder: Path) -> None:
    (folder / "part-1").write_bytes(b"\1" * 500 + b"\3" + b"\1" * 499)


def lose_a_file(folder: Path) -> None:
    (folder / "part-0").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def truncate_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 50)


def empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def lie_in_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"number": 2', '"number": 3'))


def lose_everything(folder: Path) -> None:
    shutil.rmtree(folder)


DAMAGES = [
    (truncate, r"file part-1, key bytes: expected 1000, found 400 \(rank 0, 1\)"),
    (flip_a_bit, r"file part-1, key sha256: expected [0-9a-f]{64}, found [0-9a-f]{64} \(rank 1\)"),
    (lose_a_file, r"file part-0, key file: expected 1000 bytes, found No such file or directory \(rank 0, 1\)"),
    (lose_the_manifest, r"file manifest.json, key file: expected .*, found No such file or directory"),
    (truncate_the_manifest, r"file manifest.json, key contents: expected .*, found JSONDecodeError"),
    (empty_the_manifest, r"file manifest.json, key contents: expected .*, found KeyError: 'seal'"),
    (lie_in_the_manifest, r"file manifest.json, key seal: expected [0-9a-f]{64}, found [0-9a-f]{64}"),
    (lose_everything, r"file manifest.json, key file: expected .*, found No such file or directory"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
@ranks(2)
def test_damaged_newest_checkpoint_is_named_and_the_previous_one_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    checkpoints = filled(tmp_path, 1, 2)
    change(lambda: damage(tmp_path / "step-000002"))
    name, said = newest(checkpoints)

    assert name == "step-000001"
    assert len(said) == 1
    assert re.match(rf"{re.escape(str(tmp_path))}/step-000002 is refused: {problem}", said[0]), said


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
@ranks(2)
def test_every_rank_refuses_incomplete_checkpoints(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    filled(tmp_path, 2)
    change(lambda: damage(tmp_path / "step-000002"))

    for resume in (tmp_path, tmp_path / "step-000002"):
        with pytest.raises(CheckpointError, match=rf"rank {dist.get_rank()}: .*step-000002 is refused: {problem}"):
            choose(resume, None, lambda text: None)


@ranks(2)
def test_error_on_one_rank_makes_all_ranks_refuse(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(manifest, "MANIFEST", "on another file system")
        with pytest.raises(CheckpointError, match=r"key file: .*\(rank 1\)"):
            checkpoints.newest(lambda text: None)


@ranks(2)
def test_unannounced_checkpoint_with_the_same_name_is_not_loaded_and_is_replaced(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    change(lambda: (tmp_path / "newest").write_text("step-000001"))
    assert newest(CheckpointFolder(tmp_path)) == ("step-000001", [])

    CheckpointFolder(tmp_path).save(2, {"colour": "red"}, write)
    assert CheckpointFolder(tmp_path).newest(pytest.fail).facts == {"colour": "red"}
    assert on_disk(tmp_path) == ["newest", "step-000001", "step-000002"]


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
def test_checkpoint_of_another_format_is_refused_even_with_an_older_valid_one(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "VERSION", 99)
        filled(tmp_path, 2)

    with pytest.raises(CheckpointError, match=r"file manifest.json, key version: expected 1, found 99 \(rank 0, 1\)"):
        CheckpointFolder(tmp_path).newest(pytest.fail)


# --- choosing ---


@ranks(2)
def test_run_without_resume_starts_from_the_beginning(tmp_path: Path) -> None:
    assert choose(None, None, pytest.fail) is None
    assert choose(None, tmp_path / "new", pytest.fail) is None


@ranks(2)
def test_first_run_of_repeated_command_starts_without_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []

    assert choose(tmp_path / "new", tmp_path / "new", said.append) is None
    assert said == [f"{tmp_path / 'new'} contains no checkpoint yet: this run starts from step 0"]
    filled(tmp_path / "new", 1)
    found = choose(tmp_path / "new", tmp_path / "new", pytest.fail)
    assert found is not None
    assert found.step == 1


@ranks(2)
def test_older_checkpoint_can_be_named_and_newer_ones_are_not_read(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)

    found = choose(tmp_path / "step-000001", tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize(
    ("there", "found"), [(None, "no such folder"), ([], "nothing"), (["a.txt", "b.txt"], "a.txt, b.txt")]
)
@ranks(2)
def test_folder_without_checkpoints_cannot_be_resumed(tmp_path: Path, there: list[str] | None, found: str) -> None:
    folder = tmp_path / "x"
    if there is not None:
        change(folder.mkdir)
        change(lambda: [(folder / name).write_text("") for name in there])
    with pytest.raises(CheckpointError, match=rf"rank {dist.get_rank()}: .*expected a checkpoint, .*, found {found}"):
        choose(folder, tmp_path / "elsewhere", pytest.fail)


@ranks(2)
def test_new_run_must_not_save_in_folder_of_other_run(tmp_path: Path) -> None:
    filled(tmp_path / "a", 100)
    filled(tmp_path / "b", 100)
    for resume in (None, tmp_path / "b", tmp_path / "b" / "step-000100"):
        with pytest.raises(CheckpointError, match=r"found step-000100. Add --resume .*/a, or save to another folder"):
            choose(resume, tmp_path / "a", pytest.fail)


@pytest.mark.pure
def test_differences_are_named_by_their_path_and_shown_with_both_values() -> None:
    flaws = differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5, "e": 6}}, file="f")

    assert flaws == [Flaw("f", "a.c", 2, 5), Flaw("f", "a.e", "nothing", 6), Flaw("f", "d", 3, "nothing")]
    assert str(flaws[0]) == "file f, key a.c: expected 2, found 5"


# --- acting together ---


@ranks(2)
def test_failure_on_one_rank_fails_on_all_with_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1: ZeroDivisionError: division by zero$"):
        together(lambda: 1 / (1 - dist.get_rank()))
    with pytest.raises(RuntimeError, match=r"^rank 0: ValueError: no$"):
        on_first_rank(_say_no)

    assert together(lambda: dist.get_rank() + 5) == dist.get_rank() + 5
    assert on_first_rank(lambda: dist.get_rank() + 5) == 5


def _say_no() -> None:
    raise ValueError("no")
