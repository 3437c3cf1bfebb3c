"""Recordings of many setups, made once, by two processes, and kept in ``build/``.

A recording depends on neither card nor network. The name of its file is a hash of the setup and of the sources of the
package, so a change of the engine or of the simulator records again.

Spec: CHECKED-03.
"""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path

from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.setup import Setup

__all__ = ["FOLDER", "path_of", "recorded"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "published"
# Seconds after which a recording that has not ended is given up.
LIMIT = 1800


def path_of(setup: Setup, sources: str, folder: Path = FOLDER) -> Path:
    """The file of a recording."""
    return folder / f"{hashlib.sha256(f'{sources} {setup!r}'.encode()).hexdigest()[:24]}.pickle.gz"


def hash_of_sources() -> str:
    """A hash of the sources that a recording depends on."""
    folders = (ROOT / "minifsdp", ROOT / "minifsdp_gloo", ROOT / "minifsdp_tools")
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    # The command, its table and its search use recordings and do not change them.
    ignored = {"__main__.py", "report.py", "search.py", "machine.py", "replay.py"}
    texts = [file.read_bytes() for file in files if file.parent.name != "simulate" or file.name not in ignored]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def recorded(setups: Iterable[Setup], num_processes: int = 2, folder: Path = FOLDER) -> dict[Setup, Recording]:
    """The recording of each setup, from its file if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = hash_of_sources()
    wanted = {setup: path_of(setup, sources, folder) for setup in setups}
    missing = [(setup, path) for setup, path in wanted.items() if not path.exists()]
    if missing:
        # Long ones first, so that the processes end at about the same time.
        missing.sort(key=lambda one: one[0].accumulation, reverse=True)
        with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
            pending = [pool.apply_async(_record, one) for one in missing]
            for number, one in enumerate(pending, 1):
                one.get(timeout=LIMIT)
                print(f"{number} of {len(pending)} recorded", file=sys.stderr, flush=True)
    return {setup: pickle.loads(gzip.decompress(path.read_bytes())) for setup, path in wanted.items()}


def _record(setup: Setup, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(pickle.dumps(record(setup)), compresslevel=1))
    part.replace(path)
