"""Each row of the migration table, and the script that prints the table, started from the command line."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spec_tests.harness import device, ranks
from spec_tests.harness.programs import output_of_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tutorials" / "migrate.py"


def script() -> Any:
    """The script as a module. Like a script, it imports from its own folder."""
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(SCRIPT.parent)
        return importlib.import_module("migrate")


ROWS = script().ROWS


def rows_for(num_ranks: int) -> Any:
    names = [name for name, row in ROWS.items() if row.num_ranks == num_ranks]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.spec(*ROWS[n].ids)) for n in names])


def outcome(name: str) -> str:
    migrate = script()
    place = migrate.Place(dist.get_rank(), dist.get_world_size(), device(), dist.get_backend())
    return migrate.check(name, place)


@rows_for(2)
@ranks(2)
def test_both_sides_of_entry_train_alike(name: str) -> None:
    assert "equal losses" in outcome(name)


@rows_for(4)
@ranks(4)
def test_both_sides_of_hybrid_entry_train_alike(name: str) -> None:
    assert "equal losses" in outcome(name)


def test_table_has_every_migration_requirement() -> None:
    wanted = set(re.findall(r"^\| (MIG-\d+) \|", (REPOSITORY / "docs" / "spec.md").read_text(), re.MULTILINE))
    assert wanted
    assert {number for row in ROWS.values() for number in row.ids} == wanted


def test_program_runs_under_a_launcher() -> None:
    said = output_of_ranks(SCRIPT, num_ranks=4, environment={"OMP_NUM_THREADS": "1"})
    for row in ROWS.values():
        assert f"{row.old} -> {row.new}" in said
    assert "not run" not in said
