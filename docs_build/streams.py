"""What the page about streams shows: pictures of logged steps, the broken engines, and what collides in torch's FSDPs.

None of it is made while the site is built. A log needs the simulated device, which is for one process and one version
of torch; so commands and people beside the tests write it down, and tests compare it with the engine as it is:

* ``python -m spec_tests.streams.pictures`` draws ``docs/assets/streams``;
* ``python -m spec_tests.streams.breaks`` writes `BREAKS`, a row for each broken engine: ``name``, ``what`` is broken in
  which ``file``, the ``program`` that notices, ``by`` what, the first line of the ``report``, and what ``replay`` said;
* ``python -m spec_tests.streams.peaks --record`` writes `PEAKS`, minifsdp's and torch's by way to train and kind;
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
SOURCE = "Simulated: order and waits are those of a logged step. Nothing of this was seen on a GPU."


def figure(name: str, caption: str) -> str:
    """A picture with its caption.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    return pictures.figure((PICTURES / f"{name}.svg").read_text(encoding="utf-8"), caption, SOURCE)


def breaks() -> str:
    """The broken engines as a folded table, with a line that counts them."""
    if not BREAKS.exists():
        return "<p>No run of the broken engines is recorded.</p>"
    known = json.loads(BREAKS.read_text(encoding="utf-8"))
    num_found = sum(one["report"] != NOT_FOUND for one in known)
    rows = "".join(_break(one) for one in known)
    return (
        f'<details class="proof"><summary>{num_found} of {len(known)} broken engines found</summary>'
        '<table class="proof-rows"><thead><tr><th>broken</th><th>what is wrong</th><th>noticed by</th></tr></thead>'
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
    """Bytes at the worst moment of a step, minifsdp's over torch's, as a Markdown table."""
    known = json.loads(PEAKS.read_text(encoding="utf-8"))["peaks"]
    kinds = list(next(iter(known.values())))
    lines = ["| | " + " | ".join(f"{kind} | ratio" for kind in kinds) + " |", "|---|" + "--:|--:|" * len(kinds)]
    for case, by_kind in known.items():
        cells = [f"{ours:,} / {theirs:,} | {ours / theirs:.3f}" for ours, theirs in by_kind.values()]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def findings() -> str:
    """What the checker finds in torch's own FSDPs, as Markdown whose headlines are below those of the page."""
    _, _, text = FINDINGS.read_text(encoding="utf-8").partition("\n")
    return text.replace("\n## ", "\n### ").strip()
