"""The interface to the site generator, currently mkdocs. No other module in this folder imports mkdocs.

The theme, Material for MkDocs, is maintained until May 2027. Its authors continue with Zensical, which reads the same
pages and most of the same settings (``CONTRIBUTING.md``, "The documentation site"). A migration only has to replace
this module and ``hook.py``, whose functions mkdocs calls by their names.
"""

from typing import Any

from mkdocs.structure.files import File, Files  # noqa: F401
from mkdocs.structure.toc import get_toc
from mkdocs.utils import get_relative_url
from mkdocs.utils.meta import get_data


def relative(target: str, start: str) -> str:
    """The relative address of a page or file, as a link on the page ``start``."""
    return str(get_relative_url(target, start))


def front_matter(text: str) -> tuple[str, dict[str, Any]]:
    """A page without its front matter, and the front matter."""
    body, facts = get_data(text)
    return str(body), dict(facts)


def generated(config: Any, place: str, content: str) -> Any:
    """A generated file of the site, which does not exist on disk."""
    return File.generated(config, place, content=content)


def contents(headings: list[Any]) -> Any:
    """A page's table of contents from nested headings."""
    return get_toc(headings)
