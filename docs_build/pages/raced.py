"""The results of the benchmarks in a few sentences, for the beginning of their tables.

Worked example: with medians of 0.5 and 0.8 for minifsdp and 0.6 and 0.7 for DDP in two workloads, minifsdp is faster
than torch in 2 of 2 workloads and takes 0.50 to 0.80 of the time, and DDP is faster than minifsdp in 1 of 2.
"""

from typing import Any

from docs_build.recording.records import of_record


@of_record("benchmarks")
def found(record: Any) -> str:
    """Time, the price of sharding, and memory; each sentence only if the record has its data."""
    medians = {name: _medians(by_contender) for name, by_contender in record.get("ratios", {}).items()}
    ours = {name: _of(found, "minifsdp") for name, found in medians.items()}
    ours = {name: times for name, times in ours.items() if times}
    said = []
    if ours:
        best = {name: min(times) for name, times in ours.items()}
        num_faster = sum(time < 1 for time in best.values())
        slower = sorted(name for name, times in ours.items() if max(times) > 1)
        said.append(
            f"**Time.** The fastest minifsdp takes {min(best.values()):.2f} to {max(best.values()):.2f} of the time of "
            f"torch's fastest FSDP, and is faster in {num_faster} of {len(best)} workloads."
        )
        if slower:
            where = ", ".join(f"`{name}`" for name in slower)
            said.append(f"At least one configuration of minifsdp is slower than torch's fastest FSDP in {where}.")
        ddp = {name: times["DDP"] for name, times in medians.items() if "DDP" in times and name in best}
        num_slower = sum(time < best[name] for name, time in ddp.items())
        said.append(
            "DDP, which shards nothing and stores the whole model on every rank, is faster than the fastest minifsdp "
            f"in {num_slower} of {len(ddp)} workloads."
        )
    peaks = {who: max(size for _, size in curve) for who, curve in record.get("memory", {}).items()}
    mine, torchs = list(_of(peaks, "minifsdp")), list(_of(peaks, "torch"))
    if mine and torchs:
        others = f", and DDP {peaks['DDP']:.0f}" if "DDP" in peaks else ""
        said.append(
            f"**Memory.** At the peak of a step of `gpt`, minifsdp has {_range(mine)} MiB in live tensors, "
            f"torch's FSDP {_range(torchs)}{others}."
        )
    return " ".join(said)


def _medians(by_contender: dict[str, dict[str, float]]) -> dict[str, float]:
    return {who: ratio["median"] for who, ratio in by_contender.items()}


def _of(values: dict[str, float], library: str) -> list[float]:
    """The values of the contenders of one library."""
    return [value for who, value in values.items() if who.split()[0] == library]


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"
