"""Combinations of options that take minutes: any three options of an iteration on two ranks, any two on four ranks."""

from __future__ import annotations

import pytest

from spec_tests.random_programs.judge import failure_of
from spec_tests.random_programs.pairs import OPTIONS, description_of, table


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@pytest.mark.parametrize("num_ranks", ["2", "4"])
@pytest.mark.parametrize("api", OPTIONS)
def test_any_options_together_train_and_resume_like_one_process(api: str, num_ranks: str) -> None:
    rows = table({**OPTIONS[api], "ranks": (num_ranks,)}, triples=num_ranks == "2")
    failure = failure_of([description_of(row, api) for row in rows])
    if failure is not None:
        pytest.fail(failure, pytrace=False)
