"""Measured times and memory as tables. The records are written by these commands:

===================================================  ==================================
``python -m spec_tools.benchmarks --record``         `ratios`, `peaks`, `checks`, `optimizers`
``python -m spec_tools.benchmarks.growth --record``  `growth`, `large`
``python -m spec_tools.published``                   `published`, `published_errors`
===================================================  ==================================
"""

import csv
from statistics import median
from typing import Any

from docs_build.reading.text import table
from docs_build.recording.records import DATA, of_record

CHECKS = {"ledger": "always enabled", "all": "all checks"}
OPTIMIZERS = {
    "single": "plain, not sharded",
    "torch FSDP1 flat": "torch `FullyShardedDataParallel`",
    "torch FSDP1 orig": "the same, `use_orig_params=True`",
    "torch FSDP2": "torch `fully_shard`",
    "minifsdp flat": "`FullyShardedDataParallel`",
    "minifsdp orig": "the same, `use_orig_params=True`",
    "minifsdp FSDP2": "`fully_shard`",
}
ACTIONS = {"default": "AdamW", "foreach": "`foreach=True`", "fused": "`fused=True`", "clipping": "clipping"}
UNITS = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "memory_gib": "GiB"}


def _stated(record: Any, shown: str) -> str:
    """A table, with the circumstances of its record below it."""
    return "\n".join([shown, "", *record["circumstances"]])


@of_record("benchmarks")
def ratios(record: Any) -> str:
    """The time of a step over that of torch's fastest FSDP: a row for each workload, a column for each contender."""
    contenders = list(dict.fromkeys(name for by_name in record["ratios"].values() for name in by_name))
    rows = [
        [f"`{workload}`", *(f"{by_name[name]['median']:.2f}" if name in by_name else "" for name in contenders)]
        for workload, by_name in record["ratios"].items()
    ]
    return _stated(record, table(["", *contenders], rows, "lr"))


@of_record("benchmarks")
def peaks(record: Any) -> str:
    """The most bytes of live tensors in a step."""
    rows = [[name, f"{max(size for _, size in curve):.1f}"] for name, curve in record["memory"].items()]
    return table(["", "MiB at the peak of a step of `gpt`"], rows, "lr")


@of_record("debug-cost")
def checks(record: Any) -> str:
    """A row for each check, permanent or of ``minifsdp.debug()``, with the conditions below the table."""
    measured = [(api, of_api, what) for api, of_api in record["apis"].items() for what in ("step", "start")]
    rows = [
        [CHECKS.get(name, f"`{name}`"), *(_ratio(of_api[what].get(name)) for _, of_api, what in measured)]
        for name in measured[0][1]["step"]
    ]
    rows.append(["no check", *(f"{of_api[f'{what}_ms']:,.0f} ms" for _, of_api, what in measured)])
    about = f"{record['model']}; two ranks on gloo. Medians of {record['steps']} pairs of steps and"
    shown = table(["check", *(f"{what}, `{api}`" for api, _, what in measured)], rows, "lr")
    return _stated(record, f"{shown}\n\n{about} {record['starts']} pairs of starts.")


def _ratio(ratios: dict[str, Any] | None) -> str:
    if ratios is None:
        return ""
    low, high = ratios["wall_interval"]
    return f"{ratios['wall']:.2f}, {low:.3f} to {high:.3f} ({ratios['cpu']:.2f})"


@of_record("optimizer")
def optimizers(record: Any) -> str:
    """Milliseconds of CPU time of a step and of clipping, with the conditions below the table."""
    rows = [
        [OPTIMIZERS[contender], *(f"{by_action[action]['cpu']:.1f}" for action in ACTIONS)]
        for contender, by_action in record["contenders"].items()
    ]
    about = f"{record['model']}, on two ranks. Milliseconds of CPU time, so without waiting; medians of"
    return _stated(record, f"{table(['', *ACTIONS.values()], rows, 'lr')}\n\n{about} {record['rounds']} rounds.")


@of_record("growth")
def growth(record: Any, cost: str, axis: str) -> str:
    """One cost, by the number of units, of ranks, or of parameters in a unit."""
    rows = [[who, *(f"{point[cost]:,.4g}" for point in points)] for who, points in record[axis].items()]
    return table([axis, *map(str, record["axes"][axis])], rows, "lr")


@of_record("growth")
def large(record: Any) -> str:
    """The model of 7 billion parameters."""
    rows = [
        [who, f"{row['seconds']:.1f}", f"{row['stored']:.1f}", f"{row['peak']:.0f}"]
        for who, row in record["large"].items()
    ]
    return _stated(record, table(["", "seconds", "MiB kept", "MiB at most"], rows, "lr"))


def _published() -> list[dict[str, str]]:
    with (DATA / "published-predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published() -> str:
    """A line for each published measurement: its prediction, or the reason why there is none."""
    rows = []
    for line in _published():
        cells = ["", "", line["absent"]]
        if line["quantity"]:
            unit = UNITS[line["quantity"]]
            cells = [f"{float(line[kind]):,.6g} {unit}" for kind in ("predicted", "measured")]
            cells.append(f"{float(line['error_percent']):+.1f} %{', fitted' if line['fitted'] else ''}")
        rows.append([line["row"], *cells, line["constants"]])
    return table(["row", "predicted", "measured", "error", "constants"], rows, "lrrrl")


def published_errors() -> str:
    """The median errors of the predicted quantities; rows of the fit do not count."""
    errors: dict[str, list[float]] = {}
    for line in _published():
        if line["quantity"] and not line["fitted"]:
            source = "MosaicML" if line["row"].startswith("mosaicml") else "other sources"
            name = "memory" if line["quantity"] == "memory_gib" else f"time, {source}"
            errors.setdefault(name, []).append(abs(float(line["error_percent"])))
    rows = [[name, len(found), f"{median(found):.1f} %", f"{max(found):.1f} %"] for name, found in errors.items()]
    return table(["quantity", "predicted rows", "median absolute error", "largest"], rows, "lr")
