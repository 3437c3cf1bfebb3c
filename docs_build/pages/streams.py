"""The contents of the page about streams: pictures of logged steps, broken engines, and races in torch's FSDPs.

The site build creates none of them. A log needs the simulated device, which supports one process and one version of
torch. So commands and authors of the tests write these files, and tests compare them with the current engine:

* ``python -m spec_tests.streams.pictures`` draws ``docs/assets/streams``;
* ``python -m spec_tools.breaks --device simulated --record`` writes a row for each broken engine: ``name``, the broken
  behaviour (``what``) and its ``file``, the ``program`` and the check (``by``) that detect it, a line of the
  ``report``, and the ``replay``;
* ``python -m spec_tests.streams.peaks --record`` writes minifsdp's peaks and torch's, by kind of training;
* `FINDINGS` is prose.
"""

from itertools import chain
from typing import Any

from docs_build.drawing import pictures
from docs_build.reading.order import ROOT
from docs_build.reading.text import table
from docs_build.recording.records import of_record
from docs_build.templates import PAGES

PICTURES = ROOT / "docs" / "assets" / "streams"
FINDINGS = ROOT / "spec_tools" / "torch_streams" / "torch-findings.md"
NOT_FOUND = "NOT FOUND"
SOURCE = "Simulated: the order and the waits come from the log of a step. This was not measured on a GPU."


def figure(name: str, caption: str) -> str:
    """A picture with its caption.

    Raises:
        FileNotFoundError: there is no picture with that name.
    """
    return pictures.figure((PICTURES / f"{name}.svg").read_text(encoding="utf-8"), caption, SOURCE)


@of_record("stream-breaks")
def breaks(record: Any) -> str:
    """The broken engines as a folded table, below a line with their number."""
    num_found = sum(one["report"] != NOT_FOUND for one in record)
    return PAGES.breaks(f"{num_found} of {len(record)} broken engines found", record)


@of_record("stream-peaks")
def peaks(record: Any) -> str:
    """Bytes at the peak of a step, minifsdp's over torch's, as a Markdown table."""
    heads = [head for kind in next(iter(record["peaks"].values())) for head in (kind, "ratio")]
    rows = []
    for case, of_case in record["peaks"].items():
        cells = ((f"{ours:,} / {torchs:,}", f"{ours / torchs:.3f}") for ours, torchs in of_case.values())
        rows.append([case, *chain.from_iterable(cells)])
    return table(["", *heads], rows, "lr")


def findings() -> str:
    """The checker's findings in torch's own FSDPs, as Markdown with headings below those of the page."""
    _, _, text = FINDINGS.read_text(encoding="utf-8").partition("\n")
    return text.replace("\n## ", "\n### ").strip()
