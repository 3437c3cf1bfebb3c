"""Combined options train, save and resume like a single process, or are refused with an error that names them."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tests.random_programs.front_ends import sharded
from spec_tests.random_programs.judge import failure_of
from spec_tests.random_programs.modules import plain_model
from spec_tests.random_programs.pairs import OPTIONS, REFUSALS, concerns, description_of, table, wanted

apis = pytest.mark.parametrize("api", OPTIONS)


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@apis
def test_any_two_options_together_train_and_resume_like_one_process(api: str) -> None:
    # On two ranks the comparison is bitwise. `spec_tools/random_programs` has the pairs on four ranks, and the triples.
    rows = table({**OPTIONS[api], "ranks": ("2",)})
    failure = failure_of([description_of(row, api) for row in rows])
    if failure is not None:
        pytest.fail(failure, pytrace=False)


@pytest.mark.spec("PAR-09", "HOOK-10", "ORIG-12")
@pytest.mark.parametrize("case", REFUSALS)
@ranks(4)
def test_exclusive_options_are_refused_in_any_combination(case: str) -> None:
    values, error, words = REFUSALS[case]
    others = [name for name in REFUSALS if name != case]
    for row in table({**OPTIONS["wrapped"], **values, "ranks": ("4",)}, refusals=others):
        description = description_of(row, "wrapped")
        with pytest.raises(error) as refused:
            sharded(description, plain_model(description))
        for word in (f"rank {dist.get_rank()}", *words):
            assert word in str(refused.value), row


@apis
def test_table_contains_all_combinations_of_values_that_are_not_refused(api: str) -> None:
    for triples in (False, True):
        rows = table(OPTIONS[api], triples=triples)
        met = {frozenset(some) for row in rows for size in (2, 3) for some in itertools.combinations(row.items(), size)}
        assert met >= set(wanted(OPTIONS[api], triples=triples))
        assert not any(concerns(refusal, row) for refusal in REFUSALS for row in rows)

    options = {"strategy": ("FULL_SHARD", "HYBRID_SHARD"), "hook": ("", "communication"), "tied": ("no", "yes")}
    pairs = set(wanted(options))
    assert len(pairs) == 12 - 1
    assert frozenset({("strategy", "HYBRID_SHARD"), ("hook", "communication")}) not in pairs
    assert set(wanted(options, triples=True)) == pairs, "only two of the options affect an iteration"
