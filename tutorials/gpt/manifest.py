"""The manifest of a checkpoint: its contents, and how they are compared with the files.

The manifest is a JSON file in the folder of the checkpoint. It is written when all other files are complete::

    {"format": "checkpoint of minifsdp's tutorial", "version": 1, "step": 60,
     "facts": {...},                                    settings of the run that wrote it
     "files": {"__0_0.distcp": {"bytes": 198120, "sha256": "3b0c..."}, ...},
     "seal": "9f1a..."}                                 a hash of everything above

A comparison of sizes is fast, and detects incomplete files. The hash detects all other damage. The ranks share the
work: each rank hashes every n-th file. So only one rank detects a flipped bit. `gathered` sends the flaws of each rank
to all ranks, so that all ranks raise the same error. Example with two ranks and a flipped bit in `__1_0.distcp`::

    rank 0   all sizes and its hashes are correct    raises: file __1_0.distcp, key sha256: ... (rank 1)
    rank 1   the hash of __1_0.distcp is wrong       raises the same

Every flaw is reported in the same four fields: file, key, expected value, found value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .ranks import from_all_ranks

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Flaw",
    "check_files",
    "problem",
    "differences",
    "gathered",
    "names_of_files",
    "read_manifest",
    "seal_of",
    "sealed",
    "version_flaws",
]

MANIFEST = "manifest.json"
FORMAT, VERSION = "checkpoint of minifsdp's tutorial", 1
REMEDY = "Nothing was loaded. Use another checkpoint, or change the settings that differ."


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or does not fit the model. Every rank raises it, before the model is changed."""


@dataclass(frozen=True)
class Flaw:
    """A flaw of a checkpoint: its place, and the expected and the found value."""

    file: str
    key: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"file {self.file}, key {self.key}: expected {self.expected}, found {self.found}"


def differences(expected: Mapping[str, Any], found: Mapping[str, Any], *, file: str, prefix: str = "") -> list[Flaw]:
    """All entries in which two nested dictionaries differ. A missing entry has the value "nothing"."""
    flaws = []
    for key in [*expected, *(key for key in found if key not in expected)]:
        ours, theirs = expected.get(key, "nothing"), found.get(key, "nothing")
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            flaws += differences(ours, theirs, file=file, prefix=f"{prefix}{key}.")
        elif ours != theirs:
            flaws.append(Flaw(file, prefix + key, ours, theirs))
    return flaws


def problem(folder: Path, flaws: list[str] | list[Flaw], remedy: str = REMEDY) -> str:
    """The error message of this rank, with the first few flaws."""
    shown = "; ".join(str(flaw) for flaw in flaws[:4])
    more = f"; and {len(flaws) - 4} more" if len(flaws) > 4 else ""
    return f"rank {dist.get_rank()}: {folder} is refused: {shown}{more}" + (remedy and f". {remedy}")


def gathered(flaws: list[Flaw]) -> list[str]:
    """The flaws of all ranks without duplicates, each with the ranks that found it. Every rank must call it."""
    seen: dict[str, list[int]] = {}
    for rank, theirs in enumerate(from_all_ranks([str(flaw) for flaw in flaws])):
        for flaw in theirs:
            seen.setdefault(flaw, []).append(rank)
    return [f"{flaw} (rank {', '.join(map(str, ranks))})" for flaw, ranks in seen.items()]


# ---- writing ----


def names_of_files(folder: Path) -> list[str]:
    """The names of all files in a folder, in the order in which the ranks share them."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def seal_of(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON, with a hash of itself, so that damage to it is detected."""
    whole = {"format": FORMAT, "version": VERSION, **manifest}
    return json.dumps({**whole, "seal": _hash_of(whole)}, indent=1).encode()


def _hash_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading ----


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[Flaw]]:
    """The manifest as this rank reads it; empty if there is a flaw."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        seal = manifest.pop("seal")
        complete = {"format", "version", "step", "facts", "files"} <= manifest.keys()
        found = _hash_of(manifest)
    except OSError as error:
        return {}, [Flaw(MANIFEST, "file", "a file, written last of all", error.strerror)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, [Flaw(MANIFEST, "contents", "the manifest of a checkpoint", f"{type(error).__name__}: {error}")]
    if not complete or seal != found:
        return {}, [Flaw(MANIFEST, "seal", seal, found)]
    return manifest, []


def version_flaws(manifest: Mapping[str, Any]) -> list[Flaw]:
    """The differences from the format and version that this program can read. They are not damage."""
    ours = {"format": FORMAT, "version": VERSION}
    return differences(ours, {key: manifest[key] for key in ours}, file=MANIFEST)


def check_files(folder: Path, seals: Mapping[str, Mapping[str, Any]]) -> list[Flaw]:
    """Compares every size, and the hashes of this rank's share."""
    flaws = []
    for number, (name, seal) in enumerate(sorted(seals.items())):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != seal["bytes"]:
                flaws.append(Flaw(name, "bytes", seal["bytes"], size))
            elif number % dist.get_world_size() == dist.get_rank() and (found := _sha256(path)) != seal["sha256"]:
                flaws.append(Flaw(name, "sha256", seal["sha256"], found))
        except OSError as error:
            flaws.append(Flaw(name, "file", f"{seal['bytes']} bytes", error.strerror))
    return flaws
