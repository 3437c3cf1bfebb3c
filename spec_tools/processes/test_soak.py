"""The short form of the soak, and leaks that its counts must find."""

from __future__ import annotations

import mmap
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minifsdp.engine.comm_streams import CommStreams
from spec_tests.harness import pool
from spec_tools.processes import soak


@pytest.mark.ranks
@pytest.mark.cpu
@pytest.mark.spec("SOAK-01", "SOAK-02")
@pytest.mark.parametrize("api", soak.APIS)
def test_nothing_grows_during_training_evaluation_save_and_load(tmp_path: Path, api: str) -> None:
    arguments = {"api": api, "num_steps": 150, "num_warm": 50, "folder": str(tmp_path)}
    pool.run(2, soak.__name__, soak.soak.__name__, arguments, 120.0)
    assert (tmp_path / "samples.json").exists()


def start_thread() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, args=(60,), daemon=True)
    thread.start()
    return thread


def write_new_pages() -> mmap.mmap:
    """Memory of the system itself: the allocator may give out memory that this process has already used."""
    pages = mmap.mmap(-1, 20 * 2**20)
    pages.write(bytes(len(pages)))
    return pages


LEAKS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: torch.zeros(1),
    "descriptors": lambda: os.open(os.devnull, os.O_RDONLY),
    "threads": start_thread,
    "objects": lambda: CommStreams(torch.device("cpu")),
    "python_bytes": lambda: bytearray(200_000),
    "resident_bytes": write_new_pages,
    "on_disk": lambda: Path("a file").touch(),
}


@pytest.mark.pure
@pytest.mark.spec("SOAK-03")
@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_of_each_kind_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    before = soak.taken(1, tmp_path)
    kept = LEAKS[kind]()
    found = soak.grown([before, soak.taken(2, tmp_path)])
    tracemalloc.stop()
    if kind == "descriptors":
        os.close(kept)
    assert [line for line in found if line.startswith(f"{kind}: ")], (found, kept)


@pytest.mark.pure
@pytest.mark.spec("SOAK-03")
def test_a_table_that_doubles_once_is_not_a_leak() -> None:
    def grown(*sizes: int) -> list[str]:
        return soak.grown([{"step": 1, "python_bytes": size, "kinds": {}} for size in sizes])

    assert grown(0, 10_000, 170_000, 175_000) == []
    assert grown(0, 100_000, 200_000, 300_000)
