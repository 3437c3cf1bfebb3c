"""``python -m spec_tools.soak``, from the root of the repository: 2,000 steps on two ranks with each API."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import pickle
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

RECORD = pathlib.Path(__file__).resolve().parents[2] / "docs" / "data" / "soak.json"


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 1 if anything has grown."""
    # Imported late: the ranks also import this module, as the main module of their parent.
    from spec_tests.harness.pool import Failure, RankPool
    from spec_tests.harness.worker import Task
    from spec_tools.benchmarks.page import circumstances
    from spec_tools.soak import job, watch

    parser = argparse.ArgumentParser(prog="python -m spec_tools.soak")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--api", choices=["wrapper", "fully_shard"], action="append")
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD")
    parser.add_argument("--leak", choices=job.LEAKS, default="none", help="add a leak, which the job must detect")
    parser.add_argument(
        "--round-of", type=int, default=100, help="the number of steps between evaluations, saves and loads"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    chosen = parser.parse_args(arguments)
    has_grown, runs, begun_all = False, [], time.monotonic()
    for api in chosen.api or ["wrapper", "fully_shard"]:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            reported = {"api": api, "strategy": chosen.strategy, "num_steps": chosen.steps}
            reported |= {
                "num_warm": chosen.steps // 4,
                "folder": folder,
                "leak": chosen.leak,
                "round_of": chosen.round_of,
            }
            pool = RankPool(2)
            try:
                pool.run(Task(job.__name__, job.soak.__name__, pickle.dumps(reported), 3600.0, ()))
                said = "nothing has grown"
            except Failure as failure:
                has_grown, said = True, str(failure)
            finally:
                pool.close()
            file = pathlib.Path(folder, "samples.json")
            samples = json.loads(file.read_text()) if file.exists() else []
            for sample in samples[::2]:
                print(watch.line(watch.Sample(**sample)))
            head = {
                "api": api,
                "strategy": chosen.strategy,
                "steps": chosen.steps,
                "round": chosen.round_of,
                "said": said,
            }
            runs.append({**head, "first": samples[0], "last": samples[-1]} if samples else head)
        print(f"{api}, {chosen.steps} steps in {time.monotonic() - begun:.0f} s: {said}", flush=True)
    if chosen.record:
        reported = {"circumstances": circumstances(time.monotonic() - begun_all), "runs": runs}
        RECORD.write_text(json.dumps(reported, indent=1) + "\n")
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
