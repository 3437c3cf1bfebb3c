"""HTML that Markdown must not change: it is stored here while a page is converted."""

import re

_stored: list[str] = []


def raw(html: str) -> str:
    """Stores HTML; returns an element that stands for it."""
    _stored.append(html)
    return f'<div data-aside="{len(_stored) - 1}"></div>'


def put_back(html: str) -> str:
    """A converted page with all stored HTML inserted again."""
    return re.sub(r'<div data-aside="(\d+)"></div>', lambda found: _stored[int(found[1])], html)
