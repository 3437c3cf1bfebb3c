"""Records the four collectives of the page "Ranks, collectives and torchrun", and the output of its script.

    torchrun --standalone --nproc-per-node 2 -m docs_build.recording.collectives

It writes ``docs/data/collectives.json``. The page shows the record, and a test runs everything again and compares.
"""

import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docs_build.reading.order import ROOT
from docs_build.reading.text import table
from docs_build.recording import records
from docs_build.recording.records import of_record

NAME = "collectives"
NUM_RANKS = 2
PAGE = ROOT / "docs" / "learn" / "ranks.md"


def broadcast(x: Tensor) -> Tensor:
    """Copies the tensor of rank 0."""
    dist.broadcast(x, src=0)
    return x


def all_reduce(x: Tensor) -> Tensor:
    """Sums the tensors of all ranks."""
    dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """Concatenates the tensors of all ranks."""
    result = torch.empty(NUM_RANKS * len(x), dtype=x.dtype)
    dist.all_gather(list(result.chunk(2)), x)
    return result


def reduce_scatter(x: Tensor) -> Tensor:
    """Sums the tensors of all ranks, and returns the part of this rank."""
    result = torch.empty(len(x) // NUM_RANKS, dtype=x.dtype)
    dist.reduce_scatter(result, list(x.chunk(2)))
    return result


COLLECTIVES = (broadcast, all_reduce, all_gather, reduce_scatter)


def observe() -> dict[str, tuple[list[int], list[int]]]:
    """The values of this rank before and after each collective. All ranks must call it."""
    found = {}
    for function in COLLECTIVES:
        x = torch.tensor([1, 2]) + 2 * dist.get_rank()
        before = x.tolist()
        found[function.__name__] = (before, function(x).tolist())
    return found


def script() -> str:
    """The script of the page."""
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def output_of_script() -> list[str]:
    """The lines that the script prints with torchrun, by rank. Each rank writes to its own file.

    Raises:
        RuntimeError: the script has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.py"
        path.write_text(script(), encoding="utf-8")
        to_files = ["--redirects", "3", "--log-dir", folder]
        done = records.torchrun(["--standalone", "--nproc-per-node", str(NUM_RANKS), *to_files, str(path)])
        if done.returncode:
            raise RuntimeError(done.stderr)
        files = sorted(Path(folder).glob("*/attempt_0/*/stdout.log"))
        return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@of_record(NAME)
def collectives(record: Any) -> str:
    """A row for each collective, with the values of both ranks before and after it."""
    rows = []
    for function in COLLECTIVES:
        (call,) = re.findall(r"^ +(dist\..*)$", inspect.getsource(function), re.MULTILINE)
        ranks = [rank[function.__name__] for rank in record["ranks"]]
        values = [f"`{value}`" for moment in (0, 1) for value in (rank[moment] for rank in ranks)]
        rows.append([f"`{call}`", *values])
    heads = ["call", "`x` on rank 0", "`x` on rank 1", "result on rank 0", "result on rank 1"]
    return table(heads, rows, "lllll")


@of_record(NAME)
def output(record: Any) -> str:
    """The output of the script in Markdown."""
    return "\n".join(["```text", *record["script"], "```"])


@of_record(NAME)
def about(record: Any) -> str:
    """The date and the machine of the record."""
    return f"<small>Recorded on two ranks; {record['date']}, {record['machine']}.</small>"


def found() -> dict[str, Any]:
    """The contents of the record. All ranks must call it; the first one runs the script."""
    ranks = records.of_all_ranks(observe())
    return {"ranks": ranks, "script": output_of_script()} if dist.get_rank() == 0 else {}


if __name__ == "__main__":
    records.save_on_ranks(NAME, found)
