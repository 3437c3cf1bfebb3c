"""Tests that build the whole site, or open it in a browser, run only when asked for.

``python -m pytest spec_tests/docs -m docs``
"""

from __future__ import annotations

import pytest

from spec_tests.conftest import leave_out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docs: builds the documentation or opens it in a browser; needs -m docs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "docs" not in (config.option.markexpr or ""):
        leave_out(config, items, "docs tests not run (no -m docs)", lambda item: item.get_closest_marker("docs"))
