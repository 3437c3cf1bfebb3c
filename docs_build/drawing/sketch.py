"""Figures of the learning pages: panels in as many columns as fit on the page. ``sketches.svg.jinja`` draws them."""

from dataclasses import dataclass
from typing import Any

from docs_build.templates import SKETCHES


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Attributes:
        title: text above it.
        data: the arguments of the macro that draws it.
        width, height: of the drawing.
        text: text below it.
    """

    title: str
    data: dict[str, Any]
    width: float
    height: float
    text: str = ""


def figure(
    macro: str, panels: list[Panel], caption: str, source: str, kinds: list[tuple[str, str]] | None = None
) -> str:
    """Panels as one figure, each drawn by a macro; ``kinds`` are classes and words of a legend."""
    return str(SKETCHES.figure(getattr(SKETCHES, macro), panels, caption, source, kinds))


def size_of(num_bytes: float) -> str:
    """``"16.8 MB"``: three figures, and units of thousands."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:,.0f} {unit}"
