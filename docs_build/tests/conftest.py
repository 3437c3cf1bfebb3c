"""Fixtures that build the site and open it in a browser. Tests that use them run only on request:

``python -m pytest docs_build/tests -m docs``

The site is built once per session, and one browser opens it.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT
from docs_build.tests.browser import Tab, chromium, find_chromium
from spec_tests.harness.session import leave_out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docs: builds the documentation or opens it in a browser; needs -m docs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"site", "tab"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("docs")
            item.add_marker(pytest.mark.needs("mkdocs"))
    if "docs" not in (config.option.markexpr or ""):
        leave_out(config, items, "docs tests not run (no -m docs)", lambda item: item.get_closest_marker("docs"))


def build(folder: Path, environment: Mapping[str, str]) -> Path:
    """Builds the site; fails if the build has a warning, for instance about a broken link."""
    reported = {**environment, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=reported, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    return build(tmp_path_factory.mktemp("docs") / "site", os.environ)


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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    command = find_chromium()
    if command is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    with chromium(command, str(tmp_path_factory.mktemp("profile"))) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """The page of the browser, in a window of the usual size for each test."""
    yield browser
    browser.resize()
