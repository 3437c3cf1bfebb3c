"""The record of random sequences of calls in the documentation: ``python -m spec_tests.random_programs --record``."""

from __future__ import annotations

import json
import time
from pathlib import Path

from spec_tests.random_programs.draw import drawn
from spec_tests.random_programs.judge import Verdict, counted, judged
from spec_tools.benchmarks.page import circumstances

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "fuzz.json"
# The name of the front end on the page, whether some calls are made by one rank only, and the number of programs.
RECORDED = [("wrapped", False, 750), ("composed", False, 750), ("wrapped", True, 300), ("composed", True, 300)]


def record(seed: int) -> None:
    """Runs the programs of the record, and writes it."""
    begun, lines = time.monotonic(), []
    for name, is_apart, number in RECORDED:
        api = "wrapped" if name == "wrapped" else "fully_shard"
        verdicts = list(judged(drawn("apart" if is_apart else "calls", number, seed, api)))
        lines.append(json.dumps({"api": name, "apart": is_apart, "seed": seed, **summary(verdicts)}))
    head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
    between = ",\n  "
    RECORD.write_text(f'{head},\n "runs": [\n  {between.join(lines)}\n ]\n}}\n')


def summary(verdicts: list[Verdict]) -> dict[str, int]:
    """The number of programs, findings, calls and refused calls."""
    said = counted(verdicts)
    programs = [verdict.program for verdict in verdicts]
    return {
        "programs": len(verdicts),
        "findings": sum(verdict.found is not None for verdict in verdicts),
        "calls": sum(said.values()),
        "refused": sum(said.values()) - said["ok"],
        "ended early": sum(verdict.ended for verdict in verdicts),
        "hybrid": sum(program.is_hybrid for program in programs),
        "mixed precision": sum(program.precision != "full" for program in programs),
    }
