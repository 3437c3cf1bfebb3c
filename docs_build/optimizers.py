"""The cost of an optimizer step and of clipping, as a table made from `RECORD` while the site is built.

``python -m spec_tests.benchmarks.optimizer --record`` measures and writes the record.
"""

from __future__ import annotations

import json
from typing import Any

from docs_build.order import ROOT

__all__ = ["RECORD", "step", "table"]

RECORD = ROOT / "docs" / "data" / "optimizer.json"
NAMES = {
    "single": "plain, not sharded",
    "torch FSDP1 flat": "torch `FullyShardedDataParallel`",
    "torch FSDP1 orig": "the same, `use_orig_params=True`",
    "torch FSDP2": "torch `fully_shard`",
    "minifsdp flat": "`FullyShardedDataParallel`",
    "minifsdp orig": "the same, `use_orig_params=True`",
    "minifsdp FSDP2": "`fully_shard`",
}
HEADS = {"default": "AdamW", "foreach": "`foreach=True`", "fused": "`fused=True`", "clipping": "clipping"}


def _load() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def table() -> str:
    """Milliseconds of CPU time, a row for each kind, in Markdown; below it the conditions of the measurement."""
    record = _load()
    lines = ["| | " + " | ".join(HEADS.values()) + " |", "|---|" + "--:|" * len(HEADS)]
    for contender, by_action in record["contenders"].items():
        cells = [f"{by_action[action]['cpu']:.1f}" for action in HEADS]
        lines.append(f"| {NAMES[contender]} | " + " | ".join(cells) + " |")
    when, machine = (fact.removeprefix("* ") for fact in record["circumstances"][:2])
    about = f"{record['model']}, on two ranks. Milliseconds of CPU time, so without waiting; medians of"
    return "\n".join([*lines, "", f"{about} {record['rounds']} rounds; {when}, {machine}."])


def step(contender: str) -> str:
    """Milliseconds of AdamW in each of the three ways, as in ``34.1, 7.9 and 5.2``."""
    by_action = _load()["contenders"][contender]
    first, second, third = (f"{by_action[way]['cpu']:.1f}" for way in ("default", "foreach", "fused"))
    return f"{first}, {second} and {third}"
