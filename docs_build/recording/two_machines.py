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
from spec_tools.two_machines.machines import TwoMachines
from spec_tools.two_machines.training import NUM_BLOCKS, WIDTH

NAME = "two-machines"
SCRIPT = ROOT / "spec_tools" / "two_machines" / "training.py"
LINKS = ((1e9, 1e-4), (1e8, 1e-3))  # bits per second, seconds
STEPS = 6
LIMIT = 900.0  # seconds


def record() -> None:
    """Trains on two machines, and writes the results to the record.

    Raises:
        RuntimeError: the training has failed.
    """
    with tempfile.TemporaryDirectory() as folder, TwoMachines(*LINKS[0]) as machines:
        file = Path(folder) / "results"
        links = [f"{rate}:{delay}" for rate, delay in LINKS]
        jobs = machines.torchrun([str(SCRIPT), str(file), str(STEPS), *links], cwd=ROOT)
        codes = [job.wait(LIMIT) for job in jobs]
        if any(codes):
            raise RuntimeError("the training has failed; see the output above")
        results = json.loads(file.read_text())
    runs = [_summary(**result) for result in results if not result["case"]["transport"]]
    save(NAME, {**stamp(), "parameters": (NUM_BLOCKS + 1) * WIDTH**2, "runs": runs})


def _summary(link: list[float], case: dict[str, str], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "rate": link[0],
        "delay": link[1],
        "api": case["api"],
        "strategy": case["strategy"],
        "sent": round(max(result["sent"])),
        "seconds": round(min(result["seconds"]), 4),
    }


@of_record(NAME)
def two_machines(record: Any) -> str:
    """A row for each link and strategy, as Markdown."""
    of_api = {
        api: {(run["rate"], run["delay"], run["strategy"]): run for run in record["runs"] if run["api"] == api}
        for api in ("wrapper", "fully_shard")
    }
    rows = []
    for (rate, delay, strategy), run in of_api["wrapper"].items():
        seconds = [f"{run['seconds']:.2f} s", f"{of_api['fully_shard'][rate, delay, strategy]['seconds']:.2f} s"]
        least = f"{8 * run['sent'] / rate:.2f} s"
        rows.append((_link(rate, delay), f"`{strategy}`", f"{run['sent'] / 1e6:.1f} MB", least, *seconds))
    heads = ["link", "strategy", "sent by a machine", "bytes / rate", "step, `FullyShardedDataParallel`"]
    about = f"{record['date']}, {record['machine']}; a model of {record['parameters'] / 1e6:.1f} million parameters."
    return f"{table([*heads, 'step, `fully_shard`'], rows, 'llrrrr')}\n\n{about}"


def _link(rate: float, delay: float) -> str:
    number, unit = (rate / 1e9, "Gbit/s") if rate >= 1e9 else (rate / 1e6, "Mbit/s")
    return f"{number:g} {unit}, {1000 * delay:g} ms"


if __name__ == "__main__":
    record()
