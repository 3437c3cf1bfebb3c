"""The pages of the failure lab, and the recorded output that they show."""

from __future__ import annotations

import re

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import failures as recording
from docs_build.recording.results import all_rows
from spec_tools.tutorials.test_failure_lab import LAB, SAYS, SCRIPTS

pytestmark = [pytest.mark.needs("mkdocs"), pytest.mark.spec("LAB-06")]


def test_each_script_has_page_and_index_entry() -> None:
    from docs_build.pages import failures

    assert sorted(one["name"] for one in failures.failures()) == SCRIPTS
    navigation = (ROOT / "mkdocs.yml").read_text()
    for one in failures.failures():
        assert f"          - {one['title']}: lab/{one['name']}.md\n" in navigation
        assert failures.table().count(f"[`{one['name']}.py`]({one['name']}.md) | {one['symptom']} | ") == 1
        assert set(one["rows"].split()) <= set(all_rows())
        page = (failures.PAGES / f"{one['name']}.md").read_text()
        order = [f"{{{{ failure {one['name']} }}}}", "## Why", "## Fix", f"{{{{ fix {one['name']} }}}}"]
        assert sorted(order, key=page.index) == order


@pytest.mark.parametrize("name", SCRIPTS)
def test_record_equals_the_output_of_the_current_script(name: str) -> None:
    run, says = recording.recorded()[name], SAYS[name]
    lines = (LAB / f"{name}.py").read_text().splitlines()
    for rank, words in enumerate(run["broken"]):
        assert re.search(says if isinstance(says, str) else says[rank], words)
        quoted = re.findall(rf"^  {name}\.py:(\d+): (.*), in \w+$", words, re.MULTILINE)
        assert quoted
        assert [lines[int(number) - 1].strip() for number, _ in quoted] == [line for _, line in quoted]
    assert [words.splitlines()[-1] for words in run["fixed"]] == [f"rank {rank} has ended well" for rank in range(2)]
