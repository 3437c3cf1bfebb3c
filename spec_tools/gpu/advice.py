"""Describes a failed chunk: its proof, the limits of this proof, and the next commands with the meaning of each result.

The texts are in ``advice.toml``, by kind of failure. The kind follows from the end of the chunk and its output::

    outcome                                        kind
    hung                                           hang
    failed: ... hang: no answer from ranks [1]     hang
    failed: CUDA error: an illegal memory access   crash
    failed: the process died: SIGKILL              rank_died

The commands start the kit with ``--trial``, so that results with other settings do not replace those of the main run.

Spec: KIT-13.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_tools.gpu.chunks import Outcome

__all__ = ["advise", "as_lines", "kind_of"]

KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
# Facts of the machine that can explain a kind of failure, by the `about` of a warning.
CAUSES = {
    "hang": ("peer access", "XID", "NVLink", "shared memory", "MIG", "compute mode", "MPS"),
    "crash": ("XID", "ECC", "shared memory", "MPS", "MIG", "peer access"),
    "wrong_value": ("ECC", "XID", "NVLink", "peer access"),
    "out_of_memory": ("other processes", "MIG"),
    "busy_device": ("compute mode", "MIG", "MPS"),
    "rank_died": ("XID", "shared memory", "ECC"),
    "hardware": ("XID", "ECC", "NVLink"),
    "shared_memory": ("shared memory",),
    "peer_access": ("peer access", "MIG"),
    "disk_full": (),
    "invalid_device": ("MIG",),
    "error": ("open files", "MIG", "compute mode"),
}


def kind_of(outcome: Outcome) -> str:
    """The kind of a failure: a key of ``KINDS``."""
    text = f"{outcome.reason}\n{outcome.last_lines}"
    for rule in ("cause", "word", "sign", "hint"):
        for kind, one in KINDS.items():
            if rule in one and (one[rule] == outcome.word if rule == "word" else re.search(one[rule], text)):
                return kind
    raise AssertionError("the last hint applies to every text")


def advise(
    name: str, outcome: Outcome, options: Sequence[str], num_devices: int, warnings: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    """The advice for a chunk that did not pass, as values of JSON.

    Args:
        name: the chunk.
        outcome: its outcome.
        options: options of the kit for a run of only this stage.
        num_devices: the number of devices. With one of them, no command leaves out a device.
        warnings: the warnings about this machine; those that can explain this kind of failure are repeated.
    """
    kind = kind_of(outcome)
    one = KINDS[kind]
    command = " ".join(["python -m spec_tools.gpu --trial", *options, "--stages", name.split("/")[0]])
    fewer = ",".join(str(index) for index in range(num_devices - 1))
    steps = [(words, meaning) for words, meaning in one["next"] if fewer or "{fewer}" not in words]
    return {
        "kind": kind,
        "failed": f"{name}: {outcome.word}; {outcome.reason}",
        "proves": one["proves"],
        "not_proves": one["not_proves"],
        "known": [f"{w['text']}. Remedy: {w['remedy']}" for w in warnings if w["about"] in CAUSES[kind]],
        "next": [
            {"command": words.replace("{run}", command).replace("{fewer}", fewer), "meaning": meaning}
            for words, meaning in steps
        ],
    }


def as_lines(advice: dict[str, Any], files: Sequence[str] = ()) -> list[str]:
    """The advice as one block of text."""
    lines = [
        f"What failed: {advice['failed']}",
        f"It proves: {advice['proves']}",
        f"It does not prove: {advice['not_proves']}",
        *(f"This machine: {one}" for one in advice["known"]),
        *(f"File: {one}" for one in files),
        "Next commands:",
    ]
    for number, step in enumerate(advice["next"], 1):
        lines += [f"  {number}. {step['command']}", f"     {step['meaning']}"]
    return lines
