"""``python -m spec_tools.fuzz --number 2000 --seed 7 --output build/fuzz.json``, from the repository root.

``--record`` runs the programs of the record in the documentation, with both APIs and of both kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_tests.random_programs.judge import Verdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "fuzz.json"
# By name: the front end.
APIS = {"wrapped": "fsdp1", "composed": "fully_shard"}
# API, whether some calls are made by one rank only, number of programs.
RECORDED = [("wrapped", False, 750), ("composed", False, 750), ("wrapped", True, 300), ("composed", True, 300)]


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 1 if anything was found."""
    # Imported late: the ranks also import this module, as the main module of their parent.
    from spec_tests.harness import pool
    from spec_tests.random_programs.description import to_json
    from spec_tests.random_programs.draw import drawn
    from spec_tests.random_programs.judge import counted, judged, kind_of, replay_line, simplest
    from spec_tools.benchmarks.page import circumstances

    parser = argparse.ArgumentParser(prog="python -m spec_tools.fuzz")
    parser.add_argument("--number", type=int, default=2000, help="programs, half of them with each API")
    parser.add_argument("--record", action="store_true", help=f"those of {RECORD.name}, which it writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api", choices=APIS, action="append")
    parser.add_argument("--apart", action="store_true", help="programs in which some calls are made by one rank only")
    parser.add_argument("--minutes", type=float, default=60.0, help="end earlier than after all programs")
    parser.add_argument("--output", type=Path, help="the output file for the findings, as JSON")
    parser.add_argument("--smaller", type=int, default=3, help="the number of findings to simplify")
    chosen = parser.parse_args(arguments)
    apis = chosen.api or list(APIS)
    runs = RECORDED if chosen.record else [(api, chosen.apart, chosen.number // len(apis)) for api in apis]
    begun = time.monotonic()
    verdicts, reported = [], []
    for api, is_apart, number in runs:
        of_run = []
        for verdict in judged(drawn("apart" if is_apart else "calls", number, chosen.seed, APIS[api])):
            of_run.append(verdict)
            if verdict.found:
                print(verdict.found[:1500], replay_line(verdict.program), sep="\n", flush=True)
            if time.monotonic() > begun + 60 * chosen.minutes:
                break
        reported.append({"api": api, "apart": is_apart, "seed": chosen.seed, **summary(of_run)})
        print(reported[-1], flush=True)
        verdicts += of_run
    found = [verdict for verdict in verdicts if verdict.found]
    kinds = Counter(kind_of(verdict.found or "") for verdict in found)
    print(f"{len(verdicts)} programs, {len(found)} findings", *kinds.most_common(), sep="\n")
    print(*counted(verdicts).most_common(), sep="\n")
    for kind in list(kinds)[: chosen.smaller]:
        program = next(verdict.program for verdict in found if kind_of(verdict.found or "") == kind)
        print(kind, replay_line(simplest(program)), sep="\n", flush=True)
    pool.close_all()
    if chosen.record:
        lines = ",\n  ".join(map(json.dumps, reported))
        head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        RECORD.write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')
    if chosen.output:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        text = [{"case": json.loads(to_json(verdict.program)), "found": verdict.found} for verdict in found]
        chosen.output.write_text(json.dumps({"number": len(verdicts), "found": text}, indent=1) + "\n")
    return int(bool(found))


def summary(verdicts: list[Verdict]) -> dict[str, int]:
    """For a record: the number of programs, findings, calls and refused calls."""
    said = Counter(result.partition(": ")[2] for verdict in verdicts for result in verdict.log)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
