"""``python -m spec_tools.gpu``: checks minifsdp on GPUs in the time that it gets, and keeps its report up to date.

Exit status: 0 if everything passed, 1 if something did not pass or did not run, 2 if the device is not available.
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

from spec_tools.gpu import BEGIN, journal, plan, report
from spec_tools.gpu.code import ROOT
from spec_tools.gpu.hardware import CAUTIONS, num_devices, why_not_available
from spec_tools.gpu.process import end_processes, note_end, run_process
from spec_tools.gpu.stages import STAGES
from spec_tools.gpu.suite import command_for

SLOWEST_START = 120.0  # seconds until ranks have started, or tests are collected
RESERVE = 3.0  # seconds at the end for the last report


def main(arguments: Sequence[str] | None = None, build: Path = ROOT / "build", begin: float | None = None) -> int:
    """Runs the command; returns the exit status. ``begin`` is the moment from which its minutes count."""
    begin = begin or time.time()
    options = _options(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0  # torchrun has started several processes, and rank 0 runs the command
    if options.plan:
        return plan.show(options.device, options.tests, options.stages, 60 * options.minutes)
    if reason := why_not_available(options.device):
        print(reason, file=sys.stderr)
        return 2
    # SIGTERM acts like Ctrl-C, so that it also ends the running process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build = options.folder or build
    suffix = "" if options.device == "cuda" else f"-{options.device}"
    path, folder = build / f"gpu-journal{suffix}.jsonl", build / "gpu" / options.device
    folder.mkdir(parents=True, exist_ok=True)
    end_processes(folder)  # of an earlier command that was killed
    if options.fresh:
        path.unlink(missing_ok=True)
    journal.open_for(path, report.circumstances(options.device, num_devices(options.device)))
    record = run(options, folder, build / f"gpu-report{suffix}.json", begin)
    left = [f"{one['not run']} of {one['stage']}" for one in report.stages(record) if one["not run"]]
    print(f"Not run: {', '.join(left) or 'nothing'}. The same command continues. The report is in {build}")
    return int(bool(left) or any(one["outcome"] != "passed" for one in record["results"].values()))


def run(options: argparse.Namespace, folder: Path, path: Path, begin: float) -> report.Record:
    """Runs processes until everything has run, or the time is over; returns the record."""
    end = begin + 60 * options.minutes - RESERVE
    command = command_for(options.tests, options.device)
    command += ["--limit", str(options.limit), "--gpu-stages", *options.stages, "--gpu-until", str(end)]
    while time.time() < end and not journal.read().is_complete(options.stages):
        word = run_process(command, folder, options.limit + SLOWEST_START, end, path)
        known = journal.read()
        running = known.running
        if word == "ended" and not known.planned.keys() >= set(options.stages):
            word = "failed"  # before it had collected the tests
        if running or word == "failed":
            note_end(running or {"name": "the process", "stage": ""}, word, folder)
        if not running or word in journal.AGAIN:
            break
        print(f"{word} in {running['name']}", flush=True)
    return report.write(path)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=CAUTIONS, default="cuda", help="other devices test the command itself")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the whole run (default: no limit)")
    parser.add_argument("--plan", action="store_true", help="print what the run would do, and start nothing")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="(default: all)")
    parser.add_argument("--tests", nargs="+", default=["spec_tests"], help="files or folders (default: spec_tests)")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="of a test (default: 60)")
    parser.add_argument("--folder", type=Path, help="for the report and the journal (default: build)")
    parser.add_argument("--fresh", action="store_true", help="begin again, without the results of earlier runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(begin=BEGIN))
