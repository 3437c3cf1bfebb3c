"""Follows every link of the built site, without a browser and without a network."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

ANCHOR = re.compile(r'<[a-z][^<>]*?\sid="([^"]+)"')
LINK = re.compile(r'<a\s[^<>]*?\bhref="([^"]*)"')
# The scripts, styles and pictures that a browser loads with a page.
LOADED = re.compile(r'<(?:script|img|iframe|source)\s[^<>]*?\bsrc="([^"]+)"|<link\s[^<>]*?\bhref="([^"]+)"')
# Neighbours of a page, and its own address.
NOT_LOADED = re.compile(r'<link\s[^<>]*?\brel="?(?:canonical|prev|next)\b[^<>]*>')


def problems(site: Path) -> Iterator[str]:
    """Links to missing files or anchors, and loads from other hosts."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(site.resolve().rglob("*.html"))}
    anchors = {path: set(ANCHOR.findall(html)) for path, html in pages.items()}
    for path, html in pages.items():
        page = path.relative_to(site.resolve())
        loads = [source or href for source, href in LOADED.findall(NOT_LOADED.sub("", html))]
        yield from (f"{page} loads {address}" for address in loads if urlsplit(address).netloc)
        # The page for missing addresses is shown at any address, so its links cannot be relative.
        for address in LINK.findall(html) + loads if path.name != "404.html" else []:
            problem = _follow(path, unescape(address), anchors)
            if problem:
                yield f"{page} links to {address}: {problem}"


def _follow(path: Path, address: str, anchors: dict[Path, set[str]]) -> str | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in anchors and anchor not in anchors[target] and not anchor.startswith("__"):
        return f"no anchor {anchor!r}"
    return None
