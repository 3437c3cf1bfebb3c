"""The table of the time after backward, generated from a record, which must contain every measured case."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_tests.harness import ranks
from spec_tools.benchmarks import page
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.optimizers import ACTIONS, act


@pytest.mark.needs("mkdocs")
def test_table_and_text_are_generated_from_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.pages import costs
    from docs_build.recording import records

    record = records.load("optimizer")
    extra = {"contender": "minifsdp FSDP2", "cpu": 0.01025}
    benchmarks = [
        {"group": "optimizer", "stats": {"median": 0.099}, "extra_info": {**extra, "action": action}}
        for action in ACTIONS
    ]
    record["contenders"] |= page.optimizers({"benchmarks": benchmarks})
    monkeypatch.setattr(records, "DATA", tmp_path)
    (tmp_path / "optimizer.json").write_text(json.dumps(record))
    assert "| `fully_shard` | 10.2 | 10.2 | 10.2 | 10.2 |" in costs.optimizers()
    assert costs.optimizer_step("minifsdp FSDP2") == "10.2, 10.2 and 10.2"
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
    performed = []

    def timer(action: Callable[[], Any]) -> None:
        action()
        performed.append(action)

    for name, contender in CONTENDERS.items():
        if contender.shards or name == "single":
            for action in ACTIONS:
                act(timer, name, action)
    assert len(performed) == 7 * len(ACTIONS)
