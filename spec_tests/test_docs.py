"""Requirements on statements in the documentation."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "choosing.md"

pytestmark = pytest.mark.proof("text")


def says(*patterns: str) -> bool:
    text = " ".join(PAGE.read_text().split())
    return all(re.search(pattern, text) for pattern in patterns)


@pytest.mark.pure
@pytest.mark.spec("SHARD-17", "SHARD-05")
def test_the_page_on_strategies_gives_the_other_names_and_says_what_the_root_does() -> None:
    assert says(r"`FULL_SHARD` \| ZeRO-3", r"`SHARD_GRAD_OP` \| ZeRO-2", r"root.*stay unsharded")


@pytest.mark.pure
@pytest.mark.spec("HYB-11", "HYB-12")
def test_it_says_when_to_choose_hybrid_and_what_to_try_between_nodes() -> None:
    assert says(r"NCCL_CROSS_NIC=1", r"price is memory", r"_HYBRID_SHARD_ZERO2` saves the all-gathers in backward")


@pytest.mark.pure
@pytest.mark.spec("PREF-16", "LIM-07")
def test_it_advises_on_prefetch_and_on_the_limiter() -> None:
    assert says(r"`None` is advised against.*throughput", r"CPU-bound work.*`forward_prefetch=True`")
    assert says(r"off only for CPU-bound work with low memory pressure")


@pytest.mark.pure
@pytest.mark.spec("MP-30")
def test_it_says_that_mixed_precision_of_the_wrapper_is_experimental_upstream() -> None:
    assert says(r"`MixedPrecision`.*upstream calls experimental.*`_module_classes_to_ignore` in particular")


@pytest.mark.pure
@pytest.mark.spec("ORIG-06")
def test_it_says_that_the_part_of_a_parameter_on_a_rank_is_no_contract() -> None:
    assert says(r"`use_orig_params=True`.*[Ww]hich part is not guaranteed.*`summon_full_params`")
