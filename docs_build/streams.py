"""The contents of the page about streams: pictures of logged steps, broken engines, and races in torch's FSDPs.

The site build creates none of them. A log needs the simulated device, which supports one process and one version of
torch. So commands and authors of the tests write these files, and tests compare them with the current engine:

* ``python -m spec_tests.streams.pictures`` draws ``docs/assets/streams``;
* ``python -m spec_tests.streams.breaks`` writes `BREAKS`, a row for each broken engine: ``name``, ``what`` is broken in
  which ``file``, the ``program`` and the check (``by``) that detect it, a line of its ``report``, and the ``replay``;
* ``python -m spec_tests.streams.peaks --record`` writes `PEAKS`, minifsdp's and torch's, by kind of training;
* `FINDINGS` is prose.
"""

from __future__ import annotations

import json
from html import escape

from docs_build import pictures
from docs_build.order import ROOT

__all__ = ["breaks", "figure", "findings", "peaks"]

PICTURES = ROOT / "docs" / "assets" / "streams"
BREAKS = ROOT / "docs" / "data" / "stream-breaks.json"
PEAKS = ROOT / "docs" / "data" / "stream-peaks.json"
FINDINGS = ROOT / "spec_tests" / "streams" / "torch-findings.md"
NOT_FOUND = "NOT FOUND"
SOURCE = "Simulated: the order and the waits come from the log of a step. This was not measured on a GPU."


def figure(name: str, caption: str) -> str:
    """A picture with its caption.

    Raises:
        FileNotFoundError: there is no picture with that name.
    """
    return pictures.figure((PICTURES / f"{name}.svg").read_text(encoding="utf-8"), caption, SOURCE)


def breaks() -> str:
    """The broken engines as a folded table, below a line with their number."""
    if not BREAKS.exists():
        return "<p>No run of the broken engines is recorded.</p>"
    known = json.loads(BREAKS.read_text(encoding="utf-8"))
    num_found = sum(one["report"] != NOT_FOUND for one in known)
    rows = "".join(_break(one) for one in known)
    return (
        f'<details class="proof"><summary>{num_found} of {len(known)} broken engines found</summary>'
        '<table class="proof-rows"><thead><tr><th>broken</th><th>what is wrong</th><th>detected by</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></details>"
    )


def _break(one: dict[str, str]) -> str:
    replay = f"<br><small>replay: other bits in {escape(one['replay'])}</small>" if one["replay"] else ""
    return (
        f"<tr><td>{escape(one['name'])}<br><small>{escape(one['file'])}</small></td><td>{escape(one['what'])}</td>"
        f"<td>{escape(one['by'])}, in <code>{escape(one['program'])}</code>"
        f"<br>{escape(one['report'])}{replay}</td></tr>"
    )


def peaks() -> str:
    """Bytes at the peak of a step, minifsdp's over torch's, as a Markdown table."""
    known = json.loads(PEAKS.read_text(encoding="utf-8"))["peaks"]
    kinds = list(next(iter(known.values())))
    lines = ["| | " + " | ".join(f"{kind} | ratio" for kind in kinds) + " |", "|---|" + "--:|--:|" * len(kinds)]
    for case, by_kind in known.items():
        cells = [f"{ours:,} / {theirs:,} | {ours / theirs:.3f}" for ours, theirs in by_kind.values()]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def findings() -> str:
    """The checker's findings in torch's own FSDPs, as Markdown with headings below those of the page."""
    _, _, text = FINDINGS.read_text(encoding="utf-8").partition("\n")
    return text.replace("\n## ", "\n### ").strip()
