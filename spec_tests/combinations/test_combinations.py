"""Combined options train, save and resume like a single process, or are refused with an error that names them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from spec_tests.combinations.covering import Row, covering, meetings
from spec_tests.combinations.table import OPTIONS, REFUSALS, description_of, is_allowed, line_of, plain, table, wanted
from spec_tests.harness import ranks
from spec_tests.random_programs.front_ends import sharded
from spec_tests.random_programs.judge import judged
from spec_tests.random_programs.modules import plain_model

apis = pytest.mark.parametrize("api", OPTIONS)


@pytest.mark.ranks
@pytest.mark.spec("PAR-08")
@pytest.mark.parametrize("num_ranks", OPTIONS["fsdp1"]["ranks"])
@apis
def test_any_options_together_train_and_resume_like_one_process(api: str, num_ranks: str) -> None:
    # On two ranks the comparison is bitwise, and a row costs a quarter.
    rows = table(api, triples=num_ranks == "2", ranks=num_ranks)
    verdicts = judged([description_of(row, api) for row in rows])
    failures = [(line_of(row, api), v.found) for row, v in zip(rows, verdicts, strict=True) if v.found]
    if failures:
        pytest.fail("\n".join([*(line for line, _ in failures), failures[0][1]]), pytrace=False)


@pytest.mark.spec("PAR-09", "HOOK-10", "ORIG-12")
@pytest.mark.parametrize("case", REFUSALS)
@ranks(4)
def test_exclusive_options_are_refused_in_any_combination(case: str) -> None:
    refusal = REFUSALS[case]
    others = [other for name, other in REFUSALS.items() if name != case]
    options = {**OPTIONS["fsdp1"], **refusal.values, "ranks": ("4",)}

    def is_refused_once(row: Mapping[str, str]) -> bool:
        return not any(other.concerns(row) for other in others)

    for row in covering(options, meetings(options, 2, is_refused_once), is_refused_once):
        description = description_of(row, "fsdp1")
        with pytest.raises(refusal.error) as refused:
            sharded(description, plain_model(description))
        for word in (f"rank {dist.get_rank()}", *refusal.words):
            assert word in str(refused.value), row


@pytest.mark.parametrize("triples", [False, True])
@apis
def test_table_contains_all_wanted_combinations(api: str, triples: bool) -> None:
    rows = table(api, triples=triples)
    met = {frozenset(some) for row in rows for size in (2, 3) for some in itertools.combinations(row.items(), size)}
    assert met >= set(wanted(OPTIONS[api], triples=triples))


def test_wanted_pairs_contain_all_values_that_can_be_combined() -> None:
    options = {"strategy": ("FULL_SHARD", "HYBRID_SHARD"), "hook": ("none", "communication"), "tied": ("no", "yes")}
    pairs = set(wanted(options, triples=False))
    assert len(pairs) == 12 - 1
    assert frozenset({("strategy", "HYBRID_SHARD"), ("hook", "communication")}) not in pairs
    assert set(wanted(options, triples=True)) == pairs, "only two of the units run in an iteration"
    assert len(list(wanted(OPTIONS["fsdp1"], triples=True))) > 2000


@apis
def test_table_has_no_refused_combination(api: str) -> None:
    assert all(is_allowed(row) for row in table(api, triples=True))
    assert is_allowed(plain(api))


def test_same_seed_gives_the_same_table_and_another_seed_gives_another() -> None:
    assert table("fsdp1") == table("fsdp1")
    assert table("fsdp1") != table("fsdp1", seed=1)


@apis
def test_each_value_of_an_option_is_another_training_run(api: str) -> None:
    def run(**changed: str) -> object:
        return description_of({**plain(api), **changed}, api)

    rows: list[Row] = [{name: value} for name, values in OPTIONS[api].items() for value in values[1:]]
    assert len({run(), *(run(**row) for row in rows)}) == 1 + len(rows)
