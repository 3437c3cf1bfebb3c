"""The page "In which state is this parameter now?": its tables are those of a new run on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording.records import of_all_ranks
from docs_build.tests.parameter_states import observe
from spec_tests.harness import ranks

PAGE = (ROOT / "docs" / "parameter-states.md").read_text(encoding="utf-8")
# The heading of the table of a form, and its name in other tables.
FORMS = {
    "flat": ("## Flat parameters", "`FullyShardedDataParallel`"),
    "original": ("## Original parameters", "the same, `use_orig_params=True`"),
    "fully_shard": ("## Per-parameter shards", "`fully_shard`"),
}
of_form = pytest.mark.parametrize("form", FORMS)


def tables_below(heading: str) -> list[list[str]]:
    """The rows of each table of a section, without its head."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n## ")[0]
    tables = [part.splitlines() for part in section.split("\n\n") if part.startswith("| ")]
    return [table[2:] for table in tables]


def row(first: str, *of_ranks: list[Any]) -> str:
    """A row of a table. A cell has the values of both ranks if they differ."""
    cells = [" / ".join(dict.fromkeys(map(str, values))) for values in zip(*of_ranks, strict=True)]
    return f"| {' | '.join([first, *cells])} |"


def rows_of_a_new_run(form: str, *, reshard_after_forward: bool) -> list[str]:
    first, second = of_all_ranks(observe(form, reshard_after_forward=reshard_after_forward).rows)
    return [row(moment, first[moment], second[moment]) for moment in first if moment != "before sharding"]


@pytest.mark.spec("STATE-01", "STATE-02", "STATE-03", "STATE-05", "STATE-06")
@pytest.mark.cpu
@of_form
@ranks(2)
def test_page_has_each_moment_of_a_new_run_with_its_parameter_gradient_and_memory(form: str) -> None:
    every, differing = tables_below(FORMS[form][0])
    resharded = rows_of_a_new_run(form, reshard_after_forward=True)
    kept = rows_of_a_new_run(form, reshard_after_forward=False)
    assert every == resharded
    assert differing == [row for row in kept if row not in resharded]


@pytest.mark.spec("STATE-04", "STATE-05")
@pytest.mark.cpu
@of_form
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2)
def test_page_has_the_units_with_unsharded_memory_at_each_moment(form: str, *, reshard_after_forward: bool) -> None:
    (table,) = tables_below("## The memory of unsharded parameters")
    # The wrapper and `fully_shard` with resharding, then both without.
    column = (form == "fully_shard") + 2 * (not reshard_after_forward)
    shown = {}
    for line in table:
        moments, *cells = line.strip("| ").split(" | ")
        # A row can be about two moments.
        shown |= dict.fromkeys(moments.split(", "), cells[column])
    observed = observe(form, reshard_after_forward=reshard_after_forward).allocated
    assert observed == {moment: shown[moment] for moment in observed}


@pytest.mark.spec("STATE-05")
@pytest.mark.cpu
@of_form
@ranks(2)
def test_page_has_the_names_and_the_value_in_the_state_dict(form: str) -> None:
    observer, title = observe(form, reshard_after_forward=True), FORMS[form][1]
    (names,), (saved,) = tables_below("## Names"), tables_below("## Values in `state_dict()`")
    shown = [line for line in names if line.startswith(f"| {title} |")]
    found = [f"| {title} | {moment} | `{name}` | {num} |" for moment, (name, num) in observer.names.items()]
    assert [line for line in found if line in shown] == shown
    assert row(title, *of_all_ranks(observer.saved)) in saved
