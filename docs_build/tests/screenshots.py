"""Takes screenshots of one page of each kind, at desktop, tablet and phone width, in light and dark mode.

    python -m mkdocs build -d /tmp/site
    python -m docs_build.tests.screenshots /tmp/site /tmp/pictures                         all kinds
    python -m docs_build.tests.screenshots /tmp/site /tmp/pictures index.html --far 1500   one page, scrolled down

Nothing is compared automatically: a person looks at the pictures and finds errors that no test checks for.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path

from docs_build.tests.browser import Tab, chromium, find_chromium
from docs_build.tests.kinds import KINDS

SIZES = {"desk": (1440, 900), "tablet": (820, 1180), "phone": (390, 844)}
SCHEMES = {"light": "default", "dark": "slate"}


def take(tab: Tab, page: str, far: int, out: Path) -> None:
    """Takes all screenshots of a page."""
    tab.open(page)
    # Without this, elements with a transition would be shown half-way through it.
    tab.look("document.head.insertAdjacentHTML('beforeend', '<style>* { transition: none !important; }</style>'); true")
    for size, (width, height) in SIZES.items():
        tab.resize(width, height)
        for name, scheme in SCHEMES.items():
            tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); window.scrollTo(0, {far}); true")
            tab.browser.wait(0.3)
            picture = tab.send("Page.captureScreenshot", format="png")["data"]
            out.with_name(f"{out.name}-{size}-{name}.png").write_bytes(base64.b64decode(picture))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs_build.tests.screenshots")
    parser.add_argument("site", type=Path, help="a built site")
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    parser.add_argument("pages", nargs="*", default=KINDS, help="such as index.html; by default one of each kind")
    parser.add_argument("--far", type=int, default=0, help="how many pixels below the top they begin")
    options = parser.parse_args()
    command = find_chromium()
    if command is None:
        raise SystemExit("no chromium is installed (Debian: apt-get install chromium)")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium(command, profile) as tab:
        for page in options.pages:
            name = page.removesuffix(".html").replace("/", "-")
            take(tab, (options.site / page).resolve().as_uri(), options.far, options.folder / name)


if __name__ == "__main__":
    main()
