"""Fixtures that build the site and open it in a browser. Tests that use them run only on request:

``python -m pytest docs_build/tests -m docs``

The site is built once per session, and one browser opens its pages.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from docs_build.reading.order import ROOT
from docs_build.tests.browser import Tab, find_chromium
from spec_tests.harness.session import leave_out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docs: builds the documentation or opens it in a browser; needs -m docs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for fixture, package in {"site": "mkdocs", "chromium": "playwright"}.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker("docs")
                item.add_marker(pytest.mark.needs(package))
    if "docs" not in (config.option.markexpr or ""):
        leave_out(config, items, "docs tests not run (no -m docs)", lambda item: item.get_closest_marker("docs"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build fails if it has a warning, for instance about a broken link."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    command = find_chromium()
    if command is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Tab]:
    """A page of the browser, with its own storage."""
    with chromium.new_page(viewport={"width": 1280, "height": 900}) as page:
        yield Tab(page)
