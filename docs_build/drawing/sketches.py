"""The drawings of the learning pages, by name."""

from collections.abc import Callable

from docs_build.drawing import holdings, hooksteps, linkbytes, memorycurve, oneweight

SKETCHES: dict[str, Callable[[str], str]] = {
    "holdings": holdings.draw_holdings,
    "bars": holdings.draw_bars,
    "weight": oneweight.draw,
    "links": linkbytes.draw,
    "activations": memorycurve.draw,
    "hooks": hooksteps.storyboard,
    **hooksteps.STEPS,
}


def draw(name: str, caption: str) -> str:
    """A drawing as a figure.

    Raises:
        KeyError: there is no drawing with that name.
    """
    return SKETCHES[name](caption)
