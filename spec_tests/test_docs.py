"""Requirements on statements of the page *Choosing*."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "choosing.md"


@pytest.mark.proof("text")
@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(
            [r"`FULL_SHARD` \| ZeRO-3", r"`SHARD_GRAD_OP` \| ZeRO-2", r"root.*stay unsharded"],
            marks=pytest.mark.spec("SHARD-17", "SHARD-05"),
        ),
        pytest.param(
            [r"NCCL_CROSS_NIC=1", r"needs more memory", r"_HYBRID_SHARD_ZERO2` saves the all-gathers in backward"],
            marks=pytest.mark.spec("HYB-11", "HYB-12"),
        ),
        pytest.param(
            [r"Avoid `None`.*throughput", r"CPU-bound work.*`forward_prefetch=True`"],
            marks=pytest.mark.spec("PREF-16"),
        ),
        pytest.param(
            [r"off only for CPU-bound work with low memory pressure"],
            marks=pytest.mark.spec("LIM-07"),
        ),
        pytest.param(
            [r"PyTorch's documentation calls.*`MixedPrecision`.*experimental.*`_module_classes_to_ignore`"],
            marks=pytest.mark.spec("MP-30"),
        ),
        pytest.param(
            [r"`use_orig_params=True`.*part is not guaranteed.*`summon_full_params`"],
            marks=pytest.mark.spec("ORIG-06"),
        ),
    ],
)
def test_the_page_says(statements: list[str]) -> None:
    text = " ".join(PAGE.read_text().split())
    for statement in statements:
        assert re.search(statement, text)
