"""``python -m spec_tools.gpu``: runs the stages, one job after the other, and keeps the report up to date.

Exit status: 0 if all jobs passed, 1 if one did not pass or did not run, 2 if the device is not available.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spec_tools.gpu import report
from spec_tools.gpu.hardware import CAUTIONS, num_devices, why_not_available
from spec_tools.gpu.process import ROOT, Job, Outcome, end_processes, run_job
from spec_tools.gpu.stages import STAGES, Settings

SHORTEST = 10.0  # seconds; no job starts with less time left


def main(arguments: Sequence[str] | None = None, build: Path = ROOT / "build") -> int:
    """Runs the command; returns the exit status."""
    options = _options(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0  # torchrun has started several processes, and rank 0 runs the command
    if reason := why_not_available(options.device):
        print(reason, file=sys.stderr)
        return 2
    # SIGTERM acts like Ctrl-C, so that it also ends the running job.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings(options.device, num_devices(options.device), options.quick, options.limit)
    path = build / f"gpu-report{'' if options.device == 'cuda' else '-' + options.device}.json"
    about = report.circumstances(options.device, settings.num_devices, options.quick)
    outcomes = report.earlier_outcomes(path, about)
    if options.fresh:
        outcomes = {name: one for name, one in outcomes.items() if name.split("/")[0] not in options.stages}
    jobs = [job for stage in options.stages for job in STAGES[stage].jobs(settings)]
    left = [job for job in jobs if job.name not in outcomes]
    print(f"{len(left)} of {len(jobs)} jobs to run; --fresh runs all of them")
    folder = build / "gpu" / options.device
    end_processes(folder)  # of an earlier command that was killed
    deadline = time.monotonic() + 60 * options.minutes
    stage = ""
    for job in left:
        seconds = deadline - time.monotonic()
        if seconds < SHORTEST:
            print("\nThe time is over. The same command continues.")
            break
        if job.stage != stage:
            stage = job.stage
            rest = "" if math.isinf(seconds) else f" {seconds / 60:.1f} minutes are left."
            print(f"\n{stage}: {STAGES[stage].question}?{rest}", flush=True)
        outcome = outcomes[job.name] = run_job(job, folder, seconds)
        report.write(report.compose(about, outcomes, jobs), path)
        _print(job, outcome)
        if outcome.word == "stopped":
            print("\nStopped. The same command continues.")
            break
    report.write(report.compose(about, outcomes, jobs), path)
    print(f"\nThe report is in {path.with_suffix('.md')} and {path}")
    return 0 if all(job.name in outcomes and outcomes[job.name].word == "passed" for job in jobs) else 1


def _print(job: Job, outcome: Outcome) -> None:
    word = "ok" if outcome.word == "passed" else outcome.word.upper()
    print(f"  {word:8s}{outcome.seconds:7.1f} s  {job.name}  {outcome.reason}", flush=True)
    for finding in outcome.findings:
        if "line" in finding:
            print(f"    {finding['line']}", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=CAUTIONS, default="cuda", help="other devices test the command itself")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="(default: all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the whole run (default: no limit)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of a job (default: that of its stage)")
    parser.add_argument("--quick", action="store_true", help="fewer models, delays and test files")
    parser.add_argument("--fresh", action="store_true", help="also run jobs again that are in the report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
