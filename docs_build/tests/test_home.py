"""The home page and the page on evidence: numbers come from records; the builder of the site sets the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs_build.tests.browser import Tab

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.needs("mkdocs")
def test_home_page_figures_equal_those_of_the_records() -> None:
    from docs_build.pages import evidence

    shown = re.findall(r"<b>(.*?)</b>", evidence.figures())
    files = json.loads((ROOT / "docs" / "data" / "torch-tests.json").read_text())["files"]
    assert shown[0] == f"{sum(passed for passed, _ in files.values())} of {sum(ran for _, ran in files.values())}"
    ratios = json.loads((ROOT / "docs" / "data" / "benchmarks.json").read_text())["ratios"]
    medians = [one["median"] for rows in ratios.values() for name, one in rows.items() if name[:8] == "minifsdp"]
    assert shown[1].split() == [f"{min(medians):.2f}", "to", f"{max(medians):.2f}", "\N{MULTIPLICATION SIGN}"]
    rows = json.loads((ROOT / "docs" / "data" / "spec-results.json").read_text())["rows"].values()
    assert shown[2] == f"{sum(row['results']['cpu-gloo'] == 'proven' for row in rows)} of {len(rows)}"
    mutants = json.loads((ROOT / "docs" / "data" / "mutants.json").read_text())["mutants"].values()
    assert shown[3] == f"{sum(bool(one['red']) for one in mutants)} of {len(mutants)}"
    passed, ran = evidence.torch_tests()
    assert f"{passed} of {ran} pass on CPUs" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.needs("mkdocs")
def test_texts_about_the_gpu_run_have_the_numbers_of_its_record() -> None:
    from docs_build.pages import gpurun

    lines = gpurun.runs()[gpurun.FIRST]["steps"]
    times = {(line["size"], line["contender"]): line["ms"] for line in lines}
    ratios = [
        ms / times[size, name.replace("minifsdp", "torch")] for (size, name), ms in times.items() if "mini" in name
    ]
    fastest, slowest = f"{min(ratios):.2f}", f"{max(ratios) + 0.005:.2f}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{gpurun.num_passed():,} tests passed" in readme
    assert f"took {fastest} to {slowest} times as long as with torch" in readme
    assert f"{gpurun.num_passed():,} tests on an H200" in (ROOT / "docs" / "limits.md").read_text()


def test_the_command_is_that_of_the_readme() -> None:
    readme, home = (ROOT / name for name in ("README.md", "docs/index.md"))
    (command,) = re.findall(r"^python -m pip install .*train_gpt\.py$", home.read_text(encoding="utf-8"), re.MULTILINE)
    assert command in readme.read_text(encoding="utf-8").splitlines()


@pytest.mark.needs("mkdocs")
def test_repository_link_requires_a_configured_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.config import load_config

    from docs_build import hook

    file = SimpleNamespace(src_uri="index.md", url="index.html", generated_by=None)
    page = SimpleNamespace(file=file, meta={}, title="", is_homepage=True)
    for address in ("", "https://example.org/minifsdp"):
        monkeypatch.setenv("MINIFSDP_REPO_URL", address)
        written = hook.on_page_markdown(
            "[Start](x.md)\n{{ repository }}\n", page, load_config(str(ROOT / "mkdocs.yml"))
        )
        assert "{{" not in written
        assert ("The repository" in written) == bool(address)


@pytest.mark.needs("mkdocs")
def test_link_to_the_repository_requests_no_star_count() -> None:
    from docs_build import hook

    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    html = hook.on_post_page('<a href="https://example.org" class="md-source" data-md-component="source">x</a>', page)
    assert html == '<a href="https://example.org" class="md-source">x</a>'


def test_command_start_and_picture_are_visible_without_scrolling(address: str, tab: Tab) -> None:
    tab.resize(1440, 900)
    tab.open(address + "index.html")
    for selector in (".home-words .command", ".home-words .md-button--primary", ".home-picture svg"):
        assert 0 < tab.each(selector, "e.getBoundingClientRect().bottom")[0] < 900, selector
    assert tab.each(".command code", "e.scrollWidth <= e.clientWidth") == [True]
    tab.resize()
