"""Follows every link of the built site, without a browser and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["external", "problems", "scan"]


@dataclass
class Scan:
    """The anchors and the links of a page.

    Attributes:
        ids: its anchors.
        links: addresses in ``href`` of links.
        loads: addresses that a browser fetches automatically: scripts, styles, pictures.
    """

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scan = Scan()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        for name in ("id", "name"):
            if of.get(name) and (name == "id" or tag == "a"):
                self.scan.ids.add(of[name] or "")
        if tag == "a" and of.get("href") is not None:
            self.scan.links.append(of["href"] or "")
        if tag in ("script", "img", "iframe", "source") and of.get("src"):
            self.scan.loads.append(of["src"] or "")
        if tag == "link" and of.get("href") and of.get("rel") not in ("canonical", "prev", "next"):
            self.scan.loads.append(of["href"] or "")


def scan(page: Path) -> Scan:
    """Reads one page."""
    parser = _Parser()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.scan


def external(site: Path) -> Iterator[str]:
    """Addresses that a browser would fetch from other hosts."""
    for path in sorted(site.rglob("*.html")):
        for address in scan(path).loads:
            if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
                yield f"{path.relative_to(site)} loads {address}"


def problems(site: Path) -> Iterator[str]:
    """Links to missing files or anchors, and loads from other hosts."""
    scans = {path.resolve(): scan(path) for path in sorted(site.rglob("*.html"))}
    yield from external(site)
    for path, one in scans.items():
        # The page for missing addresses is shown at any address, so its links cannot be relative.
        if path.name == "404.html":
            continue
        for address in one.links + one.loads:
            problem = _follow(path, address, scans)
            if problem:
                yield f"{path.relative_to(site.resolve())} links to {address}: {problem}"


def _follow(path: Path, address: str, scans: dict[Path, Scan]) -> str | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in scans and anchor not in scans[target].ids and not anchor.startswith("__"):
        return f"no anchor {anchor!r}"
    return None
