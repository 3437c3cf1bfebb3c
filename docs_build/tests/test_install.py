"""The installation instructions."""

from __future__ import annotations

import re
import tomllib

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = [pytest.mark.pure, pytest.mark.spec("START-04"), pytest.mark.proof("text")]


def words_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", ["README.md", "docs/tools/install.md"])
def test_page_explains_installation_on_cpu_and_with_own_torch(page: str) -> None:
    text = words_of(page)
    for said in ("not on PyPI", "PyTorch's CPU index", "pytorch.org/get-started", "leave", "constraints.txt", "venv"):
        assert said in text
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"torch {version}" in text


def test_index_page_links_to_install_page() -> None:
    assert "(tools/install.md)" in words_of("docs/index.md")
    assert "not on PyPI" in words_of("docs/index.md")


def test_constraints_require_no_specific_build() -> None:
    assert "selects a version and not a build" in words_of("constraints.txt")


def test_the_package_has_authors_classifiers_and_public_addresses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"] == [{"name": "minifsdp developers"}]
    assert "License :: OSI Approved :: BSD License" in project["classifiers"]
    for address in project["urls"].values():
        assert address.startswith("https://docs.pytorch.org/") or (ROOT / address).is_file()
