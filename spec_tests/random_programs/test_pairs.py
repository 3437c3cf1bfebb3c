"""Combined options train, save and resume like a single process, or are refused with an error that names them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tests.random_programs import front_ends, judge, modules, pairs

apis = pytest.mark.parametrize("api", pairs.OPTIONS)


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@apis
def test_any_two_options_together_train_and_resume_like_one_process(api: str) -> None:
    # `spec_tools/random_programs` has the triples.
    programs = [pairs.description_of(row, api) for row in pairs.table(pairs.OPTIONS[api])]
    failure = judge.failure_of(sorted(programs, key=lambda program: program.num_ranks))
    if failure is not None:
        pytest.fail(failure, pytrace=False)


@pytest.mark.spec("PAR-09", "HOOK-10", "ORIG-12")
@pytest.mark.parametrize("case", pairs.REFUSALS)
@ranks(4)
def test_exclusive_options_are_refused_in_any_combination(case: str) -> None:
    values, error, words = pairs.REFUSALS[case]
    others = [name for name in pairs.REFUSALS if name != case]
    for row in pairs.table({**pairs.OPTIONS["wrapped"], **values}, refusals=others):
        description = replace(pairs.description_of(row, "wrapped"), num_ranks=4)
        with pytest.raises(error) as refused:
            front_ends.sharded(description, modules.plain_model(description))
        for word in (f"rank {dist.get_rank()}", *words):
            assert word in str(refused.value), row


@apis
def test_table_contains_all_combinations_of_values_that_are_not_refused(api: str) -> None:
    options = pairs.OPTIONS[api]
    in_iteration = [name for name in options if name not in pairs.NOT_IN_ITERATION]
    for number, names in ((2, options), (3, in_iteration)):
        rows = pairs.table(options, triples=number == 3)
        assert not any(map(pairs.is_refused, rows))
        for some_names in itertools.combinations(names, number):
            for values in itertools.product(*(options[name] for name in some_names)):
                some = dict(zip(some_names, values, strict=True))
                assert pairs.is_refused(some) or any(some.items() <= row.items() for row in rows), some
    assert pairs.is_refused({"strategy": "HYBRID_SHARD", "hook": "communication"})
    assert not pairs.is_refused({"strategy": "FULL_SHARD", "hook": "communication"})
