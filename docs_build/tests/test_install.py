"""The installation instructions."""

from __future__ import annotations

import re
import tomllib

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = [pytest.mark.pure, pytest.mark.spec("START-04"), pytest.mark.proof("text")]


@pytest.mark.parametrize("page", ["README.md", "docs/tools/install.md"])
def test_page_explains_installation_on_cpu_and_with_own_torch(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    words = ("not on PyPI", "PyTorch's CPU index", "pytorch.org/get-started", "leave", "constraints.txt", "venv")
    assert [said for said in (*words, f"torch {version}") if said not in text] == []
    assert "(tools/install.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "selects a version and not a build" in " ".join((ROOT / "constraints.txt").read_text().split())


def test_the_package_has_authors_classifiers_and_public_addresses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"] == [{"name": "minifsdp developers"}]
    assert "License :: OSI Approved :: BSD License" in project["classifiers"]
    for address in project["urls"].values():
        assert address.startswith("https://docs.pytorch.org/") or (ROOT / address).is_file()
