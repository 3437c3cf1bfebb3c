"""The page "Ranks, collectives and torchrun": its record, its tables, and a new run."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from docs_build.recording import collectives, records
from spec_tests.harness import ranks


@pytest.mark.spec("LEARN-07")
@pytest.mark.cpu
@ranks(2)
def test_recorded_collectives_are_those_of_a_new_run() -> None:
    recorded = records.load(collectives.NAME)["ranks"][dist.get_rank()]
    assert {name: [*values] for name, values in collectives.observe().items()} == recorded


@pytest.mark.spec("LEARN-07")
def test_script_of_the_page_prints_the_recorded_output() -> None:
    assert collectives.output_of_script() == records.load(collectives.NAME)["script"]
    assert len(collectives.script().splitlines()) == 12


@pytest.mark.spec("LEARN-07")
def test_script_shows_that_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    for line in records.load(collectives.NAME)["script"]:
        _, gathered, reduced = re.findall(r"\[.*?\]", line)
        assert gathered == reduced


@pytest.mark.spec("LEARN-07")
def test_tables_are_made_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [function.__name__ for function in collectives.COLLECTIVES]
    by_rank = [{name: [[rank], [rank + 10]] for name in names} for rank in (0, 1)]
    record = {"ranks": by_rank, "script": ["a line"], "date": "2026-01-02", "machine": "a machine"}
    monkeypatch.setattr(records, "load", lambda name: record)
    assert collectives.collectives().splitlines()[3] == "| `dist.all_reduce(x)` | `[0]` | `[1]` | `[10]` | `[11]` |"
    assert collectives.output() == "```text\na line\n```"
    assert "2026-01-02, a machine" in collectives.about()
