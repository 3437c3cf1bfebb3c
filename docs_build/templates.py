"""The templates of pages and pictures: the files ``*.jinja`` next to the modules that use them."""

from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from docs_build.reading.markup import inline, to_html


def template(name: str) -> Any:
    """The macros of a template, as functions. Additional filters:

    ``docstring`` and ``line`` for the markup of docstrings, ``markdown`` for a line of Markdown.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    makers = {"docstring": to_html, "line": inline, "markdown": partial(inline, is_markdown=True)}
    for filter_name, make in makers.items():
        templates.filters[filter_name] = lambda text, make=make: Markup(make(str(text)))
    return templates.get_template(name).module


PAGES, SKETCHES = template("pages/pages.html.jinja"), template("drawing/sketches.svg.jinja")
