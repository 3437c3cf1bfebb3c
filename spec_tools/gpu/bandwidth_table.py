"""The findings of the stage ``bandwidth`` as a table, as CSV, and as the cost of a collective for a simulator.

The table compares ``busbw`` with the peak of the card's link. Its last column is:

* ``PASS``: at least `SHARE` of the peak;
* ``WARN``: less than that, or more than the peak, which means that the time is wrong;
* empty: the card is not known, ranks share a device, or the tensor is smaller than `LARGE`, so that the time is mostly
  latency.

These words never make a chunk fail. Wrong values do.

A simulator needs the time of a collective from its bytes. Two parameters describe it, for each collective and number of
ranks: ``seconds = latency + bytes / rate``. They minimize the squares of the relative errors. Absolute errors would
ignore small tensors. Worked example: 1 MB in 30 us and 101 MB in 530 us give a latency of 25 us and 200e9 bytes per
second.

Spec: KIT-16, KIT-17, KIT-18.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_tools.gpu.cards import Card, find_card

__all__ = ["as_csv", "costs", "fit", "rows", "table", "verdict"]

Finding = Mapping[str, Any]

SHARE, LARGE = 0.45, 1 << 27
COLUMNS = (
    "collective", "ranks", "type", "unit", "bytes", "count", "us min", "us", "us max", "host us min", "host us",
    "host us max", "algbw", "busbw", "wrong", "memory", "of link", "word", "skipped",
)  # fmt: skip
SHOWN = ("collective", "ranks", "type", "bytes", "count", "us", "host us", "algbw", "busbw", "of link", "wrong", "word")


def verdict(busbw: float, size: int, link: float | None) -> str:
    """The last column; ``link`` is the peak of the link, None if it is not known or has no meaning."""
    if link is None or size < LARGE:
        return ""
    return "PASS" if SHARE * link <= busbw <= link else "WARN"


def rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """All rows, with the names of `COLUMNS`. A skipped size has no figures."""
    found = []
    for finding in findings:
        link = _link(finding)
        about = {"collective": finding.get("collective"), "ranks": finding["ranks"], "type": finding.get("dtype")}
        for row in finding.get("rows", []):
            line = {**about, "unit": row["what"], **{name: row[name] for name in ("bytes", "count", "memory")}}
            if "skipped" in row:
                found.append({**line, "skipped": row["skipped"]})
                continue
            for figure in ("us", "host us"):
                line |= dict(zip((f"{figure} min", figure, f"{figure} max"), row[figure], strict=True))
            line |= {name: row[name] for name in ("algbw", "busbw", "wrong")}
            line["of link"] = "" if link is None else f"{row['busbw'] / link:.0%}"
            found.append({**line, "word": verdict(row["busbw"], row["bytes"], link)})
    return found


def _card(finding: Finding) -> Card | None:
    return None if finding.get("shared", True) else find_card(finding["card"])


def _link(finding: Finding) -> float | None:
    card = _card(finding)
    return card.link if card else None


# ---- Markdown -------------------------------------------------------------------------------------------------------


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines of Markdown: what the figures are compared with, and the rows of `SHOWN` for some of the sizes."""
    yield "`spec_tools/gpu/bandwidth.py` describes the columns. Bandwidths are in 1e9 bytes per second."
    yield from ("", *(f"* {line}" for line in dict.fromkeys(_expected(finding) for finding in findings)))
    lines = rows(findings)
    most = max((line["memory"] for line in lines if "skipped" not in line), default=0)
    yield f"* most memory of a rank: {most / 2**20:.0f} MiB"
    yield f"* rows with wrong values: {sum(bool(line.get('wrong')) for line in lines)}"
    yield from ("", f"| {' | '.join(SHOWN)} |", "|---" * len(SHOWN) + "|")
    for line in filter(_is_shown, lines):
        size = f"{line['bytes']}{', ' + line['unit'] if line['unit'] else ''}"
        shown = {**line, "bytes": size, "us": _spread(line, "us"), "host us": _spread(line, "host us")}
        if "skipped" in line:
            shown["us"] = f"skipped: {line['skipped']}"
        yield f"| {' | '.join(str(shown.get(name, '')) for name in SHOWN)} |"
    yield "\nThe other sizes are in the CSV file next to the report, and in the JSON file next to it."


def _expected(finding: Finding) -> str:
    """The peak that the figures of a finding are compared with, or why there is none."""
    if "rows" not in finding:
        return f"{finding['ranks']} ranks: not all measured, see the failures"
    if finding["shared"]:
        return f"{finding['ranks']} ranks: ranks share a device, so no speed has a meaning"
    card = _card(finding)
    if card is None:
        return f"{finding['card']}: no peak is known for this card"
    limit = f"PASS from {SHARE:.0%} of it, for {LARGE >> 20} MiB or more"
    return f"{card.name}: {card.wire}, peak {card.link:g} in one direction; {limit}"


def _is_shown(line: Mapping[str, Any]) -> bool:
    """Whether a row is in the table: every fourth power of two from 64 KiB, 1 GiB, units, and rows with an error."""
    return bool(line["unit"] or line.get("wrong")) or line["bytes"].bit_length() % 4 == 1 or line["bytes"] >= 1 << 30


def _spread(line: Mapping[str, Any], figure: str) -> str:
    return f"{line[figure]} ({line[figure + ' min']} to {line[figure + ' max']})" if figure in line else ""


# ---- for programs ---------------------------------------------------------------------------------------------------


def as_csv(findings: Iterable[Finding]) -> str:
    """All rows as CSV with the header `COLUMNS`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(findings))
    return text.getvalue()


def costs(findings: Sequence[Finding]) -> dict[str, Any]:
    """The time of each collective by bytes, without the work of the host, and the two parameters of `fit`.

    ``rows`` are lists of bytes and seconds. ``shared`` is true if ranks shared a device. Then no time has a meaning.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in rows(findings):
        if "skipped" not in line:
            groups.setdefault((line["collective"], line["ranks"]), []).append(line)
    collectives = []
    for (collective, num_ranks), lines in groups.items():
        points = sorted((line["bytes"], line["us"] / 1e6) for line in lines)
        collectives.append({"collective": collective, "ranks": num_ranks, **fit(points), "rows": points})
    cards = sorted({finding["card"] for finding in findings if "card" in finding})
    shared = any(finding.get("shared", False) for finding in findings)
    return {"format": 1, "cards": cards, "shared": shared, "collectives": collectives}


def fit(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The ``latency`` in seconds, the ``rate`` in bytes per second, and the largest relative ``error`` of a point."""
    sizes, seconds = np.array([[size, max(time, 1e-9)] for size, time in points], dtype=float).T
    latency, per_byte = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], 1), np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte <= 0 or len(points) < 2:
        # The line through zero with the least relative errors.
        latency, per_byte = 0.0, float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
    error = np.abs((latency + per_byte * sizes) / seconds - 1).max()
    return {"latency": float(latency), "rate": 1 / float(per_byte), "error": round(float(error), 3)}
