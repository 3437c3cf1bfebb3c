"""Follows every link of the built site, without a browser and without a network."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Scan(HTMLParser):
    """The anchors and the links of a page.

    Attributes:
        ids: its anchors.
        links: addresses in ``href`` of links.
        loads: addresses that a browser fetches automatically: scripts, styles, pictures.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in (("id", "name") if tag == "a" else ("id",)) if of.get(name)}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        if tag in ("script", "img", "iframe", "source") and of.get("src"):
            self.loads.append(of["src"])
        if tag == "link" and of.get("href") and of.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(of["href"])


def problems(site: Path) -> Iterator[str]:
    """Links to missing files or anchors, and loads from other hosts."""
    scans = {path: Scan(path) for path in sorted(site.resolve().rglob("*.html"))}
    for path, one in scans.items():
        page = path.relative_to(site.resolve())
        yield from (f"{page} loads {address}" for address in one.loads if urlsplit(address).netloc)
        # The page for missing addresses is shown at any address, so its links cannot be relative.
        for address in one.links + one.loads if path.name != "404.html" else []:
            problem = _follow(path, address, scans)
            if problem:
                yield f"{page} links to {address}: {problem}"


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
