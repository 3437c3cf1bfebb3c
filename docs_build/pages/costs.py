"""Measured costs as tables and numbers: of checks, of optimizers, and of an FSDP as the work grows.

===================================================  =========================
``python -m spec_tools.benchmarks --record``         `checks`, `optimizers`
``python -m spec_tools.benchmarks.growth --record``  all others
===================================================  =========================
"""

from typing import Any

from docs_build.reading.text import table
from docs_build.recording.records import facts, load, of_record

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
# The number of units whose cost the text mentions.
UNITS = 48


@of_record("debug-cost")
def checks(record: Any) -> str:
    """A row for each check, permanent or of ``minifsdp.debug()``, with the conditions below the table."""
    measured = [(api, of_api, what) for api, of_api in record["apis"].items() for what in ("step", "start")]
    names = next(iter(record["apis"].values()))["step"]
    rows = [
        [CHECKS.get(name, f"`{name}`"), *(_ratio(of_api[what].get(name)) for _, of_api, what in measured)]
        for name in names
    ]
    rows.append(["no check", *(f"{of_api[f'{what}_ms']:,.0f} ms" for _, of_api, what in measured)])
    lines = [table(["check", *(f"{what}, `{api}`" for api, _, what in measured)], rows, "lr"), ""]
    lines += [f"{record['model']}; two ranks on gloo. Medians of {record['steps']} pairs of steps and"]
    return "\n".join([*lines, f"{record['starts']} pairs of starts.", "", *record["circumstances"]])


def _ratio(ratios: dict[str, Any] | None) -> str:
    if ratios is None:
        return ""
    # Old records have no interval.
    between = ratios.get("wall_interval")
    within = f", {between[0]:.3f} to {between[1]:.3f}" if between else ""
    return f"{ratios['wall']:.2f}{within} ({ratios['cpu']:.2f})"


@of_record("optimizer")
def optimizers(record: Any) -> str:
    """Milliseconds of CPU time of a step and of clipping, with the conditions below the table."""
    rows = [
        [OPTIMIZERS[contender], *(f"{by_action[action]['cpu']:.1f}" for action in ACTIONS)]
        for contender, by_action in record["contenders"].items()
    ]
    when, machine = facts(record)[:2]
    about = f"{record['model']}, on two ranks. Milliseconds of CPU time, so without waiting; medians of"
    return f"{table(['', *ACTIONS.values()], rows, 'lr')}\n\n{about} {record['rounds']} rounds; {when}, {machine}."


def optimizer_step(contender: str) -> str:
    """Milliseconds of AdamW in each of the three ways, as in ``34.1, 7.9 and 5.2``."""
    by_action = load("optimizer")["contenders"][contender]
    first, second, third = (f"{by_action[way]['cpu']:.1f}" for way in ("default", "foreach", "fused"))
    return f"{first}, {second} and {third}"


def _points(library: str) -> list[dict[str, float]]:
    """The costs of a unit of two parameters, forward and backward: a point for each kind of FSDP."""
    record = load("growth")
    point = record["axes"]["units"].index(UNITS)
    return [points[point] for who, points in record["units"].items() if who.split()[0] == library]


def calls(library: str) -> str:
    """Python calls for such a unit: minimum and maximum of a library's kinds."""
    found = [point["calls"] for point in _points(library)]
    return f"{min(found):.0f} to {max(found):.0f}"


def overhead(library: str) -> str:
    """Microseconds more than the plain model for that unit: flat, original, `fully_shard`."""
    found = [point.get("overhead") for point in _points(library)]
    return " / ".join("not recorded" if one is None else f"{one:.0f}" for one in found)


def calls_by_ranks(who: str) -> str:
    """Python calls of one contender, with the smallest and with the largest number of ranks."""
    first, *_, last = load("growth")["ranks"][who]
    return f"{first['calls']:.0f} to {last['calls']:.0f}"


def calls_for_a_parameter(who: str) -> str:
    """The cost of one more parameter in a unit."""
    record = load("growth")
    (fewest, *_, most), (first, *_, last) = record["axes"]["parameters"], record["parameters"][who]
    return f"{(last['calls'] - first['calls']) / (most - fewest):.0f}"


@of_record("growth")
def large(record: Any) -> str:
    """The model of 7 billion parameters."""
    rows = [
        [who, f"{row['seconds']:.1f}", f"{row['stored']:.1f}", f"{row['peak']:.0f}"]
        for who, row in record["large"].items()
    ]
    return table(["", "seconds", "MiB kept", "MiB at most"], rows, "lr")
