"""Records the time of training steps on two machines with a slow link.

``python -m docs_build.recording.two_machines`` needs Linux and root, because it creates network namespaces. It writes
``docs/data/two-machines.json``. The page "Train on several machines" shows it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from docs_build.reading.order import ROOT
from docs_build.reading.text import table
from docs_build.recording.records import of_record, save, stamp
from spec_tools.processes.machine_training import CASES, NUM_BLOCKS, WIDTH
from spec_tools.processes.machines import TwoMachines

NAME = "two-machines"
SCRIPT = ROOT / "spec_tools" / "processes" / "machine_training.py"
RATES = (1e9, 1e8)  # bits per second
STEPS = 6
LIMIT = 900.0  # seconds


def record() -> None:
    """Trains on two machines with each rate of the link, and writes the results to the record.

    Raises:
        RuntimeError: the training has failed.
    """
    runs = []
    for rate in RATES:
        with tempfile.TemporaryDirectory() as folder, TwoMachines(rate) as machines:
            file = Path(folder) / "results"
            if any(job.wait(LIMIT) for job in machines.torchrun(str(SCRIPT), str(file), str(STEPS))):
                raise RuntimeError("the training has failed; see the output above")
            for case, result in zip(CASES, json.loads(file.read_text()), strict=True):
                if not case.transport:
                    sent, seconds = round(max(result["sent"])), round(min(result["seconds"]), 4)
                    run = {"rate": rate, "api": case.api, "strategy": case.strategy}
                    runs.append({**run, "sent": sent, "seconds": seconds})
    save(NAME, {**stamp(), "parameters": (NUM_BLOCKS + 1) * WIDTH**2, "runs": runs})


@of_record(NAME)
def two_machines(record: Any) -> str:
    """A row for each link and strategy, as Markdown."""
    of_api = {
        api: {(run["rate"], run["strategy"]): run for run in record["runs"] if run["api"] == api}
        for api in ("wrapper", "fully_shard")
    }
    rows = []
    for (rate, strategy), run in of_api["wrapper"].items():
        seconds = [f"{run['seconds']:.2f} s", f"{of_api['fully_shard'][rate, strategy]['seconds']:.2f} s"]
        least = f"{8 * run['sent'] / rate:.2f} s"
        rows.append((_link(run), f"`{strategy}`", f"{run['sent'] / 1e6:.1f} MB", least, *seconds))
    heads = ["link", "strategy", "sent by a machine", "bytes / rate", "step, `FullyShardedDataParallel`"]
    about = f"{record['date']}, {record['machine']}; a model of {record['parameters'] / 1e6:.1f} million parameters."
    return f"{table([*heads, 'step, `fully_shard`'], rows, 'llrrrr')}\n\n{about}"


def _link(run: Any) -> str:
    rate = run["rate"]
    text = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
    # Links of earlier records also had a delay.
    return f"{text}, {1000 * run['delay']:g} ms" if "delay" in run else text


if __name__ == "__main__":
    record()
