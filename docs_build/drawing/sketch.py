"""The elements of the drawings on the learning pages: SVG panels in as many columns as fit on the page.

A panel is narrow, so it can be read on a phone without scrolling. Kinds of bytes differ by colour and by stripes, for
readers who cannot distinguish the colours::

    parameters    plain                all-gathered, freed and used for computation
    gradients     vertical stripes     reduced
    optimizer     horizontal stripes   never sent to other ranks

The colours are in ``docs/assets/css/learn.css``, one set for light pages and one for dark ones. No element has an id,
because ids must be unique on a page and a page has many drawings.
"""

from dataclasses import dataclass
from html import escape

STRIPE = 5  # distance between stripes


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Attributes:
        title: text above it.
        parts: SVG from the functions of this module.
        width, height: of the drawing, in the units of its parts.
        text: text below it.
    """

    title: str
    parts: list[str]
    width: float
    height: float
    text: str = ""

    def html(self) -> str:
        """The panel with its texts."""
        picture = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {self.width:g} {self.height:g}">'
            f"<title>{escape(self.title)}. {escape(self.text)}</title>{''.join(self.parts)}</svg>"
        )
        below = f'<p class="sketch-text">{escape(self.text)}</p>' if self.text else ""
        return f'<div class="sketch-panel"><p class="sketch-title">{escape(self.title)}</p>{picture}{below}</div>'


def figure(panels: list[Panel], caption: str, source: str, above: str = "") -> str:
    """Panels as one figure; ``above`` is HTML for a legend."""
    return (
        f'<figure class="sketch">{above}<div class="sketch-panels">{"".join(panel.html() for panel in panels)}</div>'
        f"<figcaption>{escape(caption)} <small>{escape(source)}</small></figcaption></figure>"
    )


def legend(kinds: list[tuple[str, str]]) -> str:
    """The legend of the kinds as HTML, from pairs of class and text."""
    items = [
        f'<li><svg viewBox="0 0 26 14">{bar(kind, 1, 1, 24, 12)}</svg> {escape(words)}</li>' for kind, words in kinds
    ]
    return f'<ul class="sketch-legend">{"".join(items)}</ul>'


def bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    """A bar of allocated bytes: kind ``"p"``, ``"g"`` or ``"o"``, or the number of the rank that owns them."""
    stripes = ""
    if kind == "g":
        stripes = "".join(f"M{x + at:.2f} {y:.2f}v{height:.2f}" for at in _steps(width))
    elif kind == "o":
        stripes = "".join(f"M{x:.2f} {y + at:.2f}h{width:.2f}" for at in _steps(height))
    path = f'<path class="stripes {kind}" d="{stripes}"/>' if stripes else ""
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>{path}'


def _steps(length: float) -> list[float]:
    return [STRIPE * number for number in range(1, int(length / STRIPE) + 1) if STRIPE * number < length - 0.5]


def box(x: float, y: float, width: float, height: float) -> str:
    """An outline for bytes that are not allocated."""
    return f'<rect class="absent" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def label(text: str, x: float, y: float, look: str = "") -> str:
    """Text that begins at ``x``; ``look`` may be ``mid``, ``end``, ``soft`` or several of these."""
    kind = f' class="{look}"' if look else ""
    return f'<text{kind} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def size_of(num_bytes: float) -> str:
    """``"16.8 MB"``: three figures, and units of thousands."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:,.0f} {unit}"
