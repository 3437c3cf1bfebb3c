"""``python -m spec_tests.fuzz --number 2000 --seed 7 --output build/fuzz.json``, from the repository root.

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

os.environ.setdefault("OMP_NUM_THREADS", "1")

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "fuzz.json"
# API, whether some calls are made by one rank only, number of programs.
RECORDED = [("wrapped", False, 750), ("composed", False, 750), ("wrapped", True, 300), ("composed", True, 300)]


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 1 if anything was found."""
    # Imported late: the ranks also import this module, as the main module of their parent.
    from spec_tests.benchmarks.page import circumstances
    from spec_tests.fuzz.case import APIS, from_json
    from spec_tests.fuzz.judge import counted, judged, kind_of, replay_line, simplest, summary
    from spec_tests.fuzz.machine import drawn
    from spec_tests.harness import pool

    parser = argparse.ArgumentParser(prog="python -m spec_tests.fuzz")
    parser.add_argument("--number", type=int, default=2000, help="programs, half of them with each API")
    parser.add_argument("--record", action="store_true", help=f"those of {RECORD.name}, which it writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api", choices=APIS, action="append")
    parser.add_argument("--apart", action="store_true", help="programs in which some calls are made by one rank only")
    parser.add_argument("--minutes", type=float, default=60.0, help="end earlier than after all programs")
    parser.add_argument("--output", type=Path, help="a file for what was found, as JSON")
    parser.add_argument("--smaller", type=int, default=3, help="how many findings to make smaller")
    parser.add_argument("--replay", metavar="JSON", help="run this program again")
    parser.add_argument("--shrink", metavar="JSON", help="make this program smaller")
    chosen = parser.parse_args(arguments)
    if chosen.replay:
        (verdict,) = judged([from_json(chosen.replay)])
        pool.close_all()
        print(*verdict.log, verdict.found or "nothing is found", sep="\n")
        return int(verdict.found is not None)
    if chosen.shrink:
        print(replay_line(simplest(from_json(chosen.shrink))))
        pool.close_all()
        return 0
    apis = chosen.api or list(APIS)
    runs = RECORDED if chosen.record else [(api, chosen.apart, chosen.number // len(apis)) for api in apis]
    begun = time.monotonic()
    verdicts, reported = [], []
    for api, is_apart, number in runs:
        of_run = []
        for verdict in judged(drawn(number, api, chosen.seed, is_apart=is_apart)):
            of_run.append(verdict)
            if verdict.found:
                print(verdict.found[:1500], replay_line(verdict.case), sep="\n", flush=True)
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
        case = next(verdict.case for verdict in found if kind_of(verdict.found or "") == kind)
        print(kind, replay_line(simplest(case)), sep="\n", flush=True)
    pool.close_all()
    if chosen.record:
        lines = ",\n  ".join(map(json.dumps, reported))
        head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        RECORD.write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')
    if chosen.output:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        text = [{"case": vars(verdict.case), "found": verdict.found} for verdict in found]
        chosen.output.write_text(json.dumps({"number": len(verdicts), "found": text}, indent=1) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
