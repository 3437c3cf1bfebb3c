"""Combined options train, save and resume like a single process, or are refused with an error that names them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tests.random_programs.front_ends import sharded
from spec_tests.random_programs.judge import failure_of
from spec_tests.random_programs.modules import plain_model
from spec_tests.random_programs.pairs import NOT_IN_ITERATION, OPTIONS, REFUSALS, description_of, is_refused, table

apis = pytest.mark.parametrize("api", OPTIONS)


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@apis
def test_any_two_options_together_train_and_resume_like_one_process(api: str) -> None:
    # `spec_tools/random_programs` has the triples.
    programs = [description_of(row, api) for row in table(OPTIONS[api])]
    failure = failure_of(sorted(programs, key=lambda program: program.num_ranks))
    if failure is not None:
        pytest.fail(failure, pytrace=False)


@pytest.mark.spec("PAR-09", "HOOK-10", "ORIG-12")
@pytest.mark.parametrize("case", REFUSALS)
@ranks(4)
def test_exclusive_options_are_refused_in_any_combination(case: str) -> None:
    values, error, words = REFUSALS[case]
    others = [name for name in REFUSALS if name != case]
    for row in table({**OPTIONS["wrapped"], **values}, refusals=others):
        description = replace(description_of(row, "wrapped"), num_ranks=4)
        with pytest.raises(error) as refused:
            sharded(description, plain_model(description))
        for word in (f"rank {dist.get_rank()}", *words):
            assert word in str(refused.value), row


@apis
def test_table_contains_all_combinations_of_values_that_are_not_refused(api: str) -> None:
    options = OPTIONS[api]
    in_iteration = [name for name in options if name not in NOT_IN_ITERATION]
    for triples in (False, True):
        rows = table(options, triples=triples)
        assert not any(map(is_refused, rows))
        for names in [
            *itertools.combinations(options, 2),
            *(itertools.combinations(in_iteration, 3) if triples else []),
        ]:
            for values in itertools.product(*(options[name] for name in names)):
                some = dict(zip(names, values, strict=True))
                assert is_refused(some) or any(some.items() <= row.items() for row in rows), some
    assert is_refused({"strategy": "HYBRID_SHARD", "hook": "communication"})
    assert not is_refused({"strategy": "FULL_SHARD", "hook": "communication"})
