"""Records time, memory and files of checkpoints on 2, 4 and 8 processes, and calculates those of 1,024 ranks.

    python -m docs_build.recording.checkpoint_scale [RANKS...]

It updates ``docs/data/checkpoint-scale.json``; with ``RANKS``, only the runs with these numbers of ranks. The page
"Checkpoints at scale" shows the tables.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from docs_build.reading.text import table
from docs_build.recording.busy import Others
from docs_build.recording.records import load, of_record, save, stamp, torchrun
from minifsdp_tools.formulas import size_of
from spec_tools.processes.checkpoint_costs import NUM_BLOCKS, REPEATS, WIDTH, checkpoint
from spec_tools.processes.checkpoint_sizes import Checkpoint, llama_70b

SIZES = (2, 4, 8)
MANY = (64, 256, 1024)
CALLS = {"save": "save", "load": "load", "begin_async_save": "`async_save` until it returns", "save_full": "save full"}


@of_record("checkpoint-scale")
def seconds(record: Any) -> str:
    """Milliseconds of each call, with the circumstances below the table."""
    rows = [
        [f"`{api}`", ranks, *(f"{of_api['seconds'][call] * 1000:,.0f}" for call in CALLS)]
        for ranks, by_api in _runs(record)
        for api, of_api in by_api.items()
    ]
    return "\n".join([table(["API", "ranks", *CALLS.values()], rows, "lr"), "", _circumstances(record)])


@of_record("checkpoint-scale")
def memory(record: Any) -> str:
    """The largest memory of a rank during each call, files, and the sizes of files."""
    rows = []
    for ranks, by_api in _runs(record):
        for api, of_api in by_api.items():
            calculated = checkpoint(ranks).save_memory(0, is_flat=api != "fully_shard")
            sizes = [of_api["memory"][call] for call in CALLS]
            files = [of_api["num_files"], size_of(of_api["file_bytes"]), size_of(of_api["metadata_bytes"])]
            rows.append([f"`{api}`", ranks, *map(size_of, sizes), size_of(calculated), *files])
    heads = ["API", "ranks", *CALLS.values(), "state dicts, calculated", "files", "largest file", "`.metadata`"]
    return table(heads, rows, "lr")


@of_record("checkpoint-scale")
def many(record: Any) -> str:
    """The checkpoint of a large model on many ranks, by calculation."""
    each = bytes_of_entry(record)
    rows = []
    for ranks in MANY:
        large = Checkpoint(llama_70b(), ranks)
        memory = [large.file_bytes(0), large.save_memory(0, is_flat=True), large.load_memory(0, is_flat=True)]
        sent, listed = large.sent_bytes(is_flat=True), large.num_listed()
        rows.append([ranks, large.num_files, *map(size_of, [*memory, sent]), f"{listed:,}", size_of(listed * each)])
    heads = ["ranks", "files", "largest file", "memory to save, wrapper", "memory to load, wrapper"]
    return table([*heads, "sent by each rank, wrapper", "shards in `.metadata`", "size of `.metadata`"], rows, "r")


def bytes_of_entry(record: Any) -> float:
    """Bytes of ``.metadata`` for each further shard: from the largest recorded number of ranks and the smallest one."""
    runs = _runs(record)
    (few, at_few), *_, (most, at_most) = runs
    grown = at_most["fully_shard"]["metadata_bytes"] - at_few["fully_shard"]["metadata_bytes"]
    return float(grown / (checkpoint(most).num_listed() - checkpoint(few).num_listed()))


def _runs(record: Any) -> list[tuple[int, Any]]:
    return sorted((int(ranks), run["apis"]) for ranks, run in record["runs"].items())


def _circumstances(record: Any) -> str:
    text = f"Milliseconds, medians of {record['repeats']} calls; {record['model']}. "
    text += f"{record['date']}, {record['machine']}."
    others = [run["others"] for run in record["runs"].values() if run["others"] is not None]
    return f"{text} Other programs used up to {max(others)} cores." if others else text


def measured(ranks: int) -> Any:
    """The measurements of both APIs on ``ranks`` new processes, and the cores that other programs used.

    Raises:
        RuntimeError: the run has failed; the message has its output.
    """
    others = Others()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        launch = ["--standalone", "--nproc-per-node", str(ranks), "-m", "spec_tools.processes.checkpoint_costs"]
        ended = torchrun([*launch, folder, str(file)])
        if ended.returncode:
            raise RuntimeError(ended.stderr[-4000:])
        return {"apis": json.loads(file.read_text(encoding="utf-8")), "others": others.cores()}


def main(*ranks: str) -> None:
    """Measures on each number of ranks, and updates the record after each of them."""
    model = f"{NUM_BLOCKS} units of two matrices with {WIDTH} x {WIDTH} elements in float32, and Adam"
    for each in ranks or map(str, SIZES):
        run = measured(int(each))
        runs = (load("checkpoint-scale") or {"runs": {}})["runs"]
        record = {**stamp(), "model": model, "repeats": REPEATS, "runs": {**runs, each: run}}
        save("checkpoint-scale", record)


if __name__ == "__main__":
    main(*sys.argv[1:])
