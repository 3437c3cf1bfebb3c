"""The templates of pages and pictures: the files ``*.jinja`` next to the modules that use them."""

from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from docs_build.reading.markup import inline, to_html, to_markdown
from docs_build.reading.text import counted, fitting, words_of


def template(name: str, **names: Any) -> Any:
    """The macros of a template, as functions. They can use ``names``, and these filters:

    ``docstring`` and ``line`` for the markup of docstrings, ``markdown`` for a line of Markdown, and the functions
    `to_markdown`, `fitting`, `counted` and `words_of`.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # Values in HTML are escaped, and those in Markdown are not.
    is_html = jinja2.select_autoescape(["html.jinja", "svg.jinja"])
    templates = jinja2.Environment(loader=loader, autoescape=is_html, trim_blocks=True, lstrip_blocks=True)
    makers = {"docstring": to_html, "line": inline, "markdown": partial(inline, is_markdown=True)}
    for filter_name, make in makers.items():
        templates.filters[filter_name] = lambda text, make=make: Markup(make(str(text)))
    others = (to_markdown, fitting, counted, words_of)
    templates.filters |= {make.__name__: make for make in others}
    return templates.get_template(name, globals=names).module


PAGES, SKETCHES = template("pages/pages.html.jinja"), template("drawing/sketches.svg.jinja")
MARKDOWN = template("pages/markdown.md.jinja")
