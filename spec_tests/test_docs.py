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
def test_strategies_page_gives_zero_names_and_explains_root() -> None:
    assert says(r"`FULL_SHARD` \| ZeRO-3", r"`SHARD_GRAD_OP` \| ZeRO-2", r"root.*stay unsharded")


@pytest.mark.pure
@pytest.mark.spec("HYB-11", "HYB-12")
def test_docs_explain_choice_of_hybrid() -> None:
    assert says(r"NCCL_CROSS_NIC=1", r"needs more memory", r"_HYBRID_SHARD_ZERO2` saves the all-gathers in backward")


@pytest.mark.pure
@pytest.mark.spec("PREF-16", "LIM-07")
def test_docs_give_advice_on_prefetch_and_limiter() -> None:
    assert says(r"Avoid `None`.*throughput", r"CPU-bound work.*`forward_prefetch=True`")
    assert says(r"off only for CPU-bound work with low memory pressure")


@pytest.mark.pure
@pytest.mark.spec("MP-30")
def test_docs_mark_wrapper_mixed_precision_as_experimental() -> None:
    assert says(r"PyTorch's documentation calls.*`MixedPrecision`.*experimental.*`_module_classes_to_ignore`")


@pytest.mark.pure
@pytest.mark.spec("ORIG-06")
def test_docs_do_not_guarantee_shard_of_param_on_rank() -> None:
    assert says(r"`use_orig_params=True`.*part is not guaranteed.*`summon_full_params`")
