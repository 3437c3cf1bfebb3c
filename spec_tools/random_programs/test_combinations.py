"""Combinations of options that take a minute: any three options of an iteration."""

from __future__ import annotations

import pytest

from spec_tests.random_programs.judge import failure_of
from spec_tests.random_programs.pairs import OPTIONS, description_of, table


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("api", OPTIONS)
def test_any_three_options_together_train_and_resume_like_one_process(api: str, part: int) -> None:
    """A third of the table."""
    programs = [description_of(row, api) for row in table(OPTIONS[api], triples=True)][part::3]
    failure = failure_of(sorted(programs, key=lambda program: program.num_ranks))
    if failure is not None:
        pytest.fail(failure, pytrace=False)
