"""The table of the time after backward, generated from a record, which must contain every measured case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_tests.harness import ranks
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.optimizer import ACTIONS, measure
from spec_tools.benchmarks.optimizer import RECORD as WRITTEN


@pytest.mark.needs("mkdocs")
def test_table_and_text_are_generated_from_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.pages import costs
    from docs_build.recording import records

    assert WRITTEN.parent == records.DATA
    record = json.loads(WRITTEN.read_text(encoding="utf-8"))
    for number, action in enumerate(ACTIONS):
        record["contenders"]["minifsdp FSDP2"][action] = {"wall": 99.0, "cpu": 10.25 * (number + 1)}
    monkeypatch.setattr(records, "DATA", tmp_path)
    (tmp_path / WRITTEN.name).write_text(json.dumps(record))
    assert "| `fully_shard` | 10.2 | 20.5 | 30.8 | 41.0 |" in costs.optimizers()
    assert costs.optimizer_step("minifsdp FSDP2") == "10.2, 20.5 and 30.8"
    assert record["circumstances"][0].removeprefix("* ") in costs.optimizers()


@pytest.mark.needs("mkdocs")
def test_page_shows_the_optimizer_table_and_contains_no_typed_times() -> None:
    from docs_build.reading.order import ROOT

    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    about = page.partition("**The optimizer of `fully_shard`.**")[2].partition("**Original parameters.**")[0]
    assert "{{ table optimizer }}" in about
    assert " ms" not in about.replace("}} ms", "")


@pytest.mark.cpu
@ranks(2)
def test_every_fsdp_library_performs_every_action() -> None:
    found = measure(1)
    assert set(found) == {"single", *(contender.name for contender in CONTENDERS if contender.shards)}
    for by_action in found.values():
        assert list(by_action) == list(ACTIONS)
        assert all(times["cpu"] > 0 for times in by_action.values())
