"""The drawings of the learning pages show values that the package computes, and are readable on a phone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from docs_build.drawing import holdings, hooksteps, linkbytes, memorycurve, oneweight
from docs_build.drawing.sketch import size_of
from docs_build.reading.papers import zero_bytes
from docs_build.recording.lessons import recorded

GB = 10**9


@pytest.mark.parametrize("num_ranks", [1, 4, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rank_holds_bytes_of_zero_formula(stage: int, num_ranks: int) -> None:
    held = holdings.bytes_held(stage, num_ranks)
    assert sum(held.values()) == zero_bytes(GB, num_ranks, stage, low=4, optimizer=8)
    assert held["p"] == 4 * GB / (num_ranks if stage == 3 else 1)


def test_drawn_weight_has_row_shards_of_torch() -> None:
    rows = torch.arange(4).chunk(oneweight.NUM_RANKS)
    assert [oneweight.rows_of(rank) for rank in range(4)] == [part.tolist() for part in rows]


@pytest.mark.parametrize("strategy", linkbytes.STRATEGIES)
def test_links_of_a_drawing_have_the_bytes_that_the_package_counts_and_the_tutorial_sent(strategy: str) -> None:
    drawn = linkbytes.links(strategy)
    summed = Counter[bool]()
    for (a, b), num_bytes in drawn.items():
        summed[a // 2 != b // 2] += num_bytes
    within, between = linkbytes.totals(strategy)
    assert (summed[False], summed[True]) == (4 * within, 4 * between)
    sent = {one.strategy: one for one in linkbytes.sent_in(recorded()["tutorials/hybrid.py"]["output"])}[strategy]
    # A model of 100,224 bytes.
    scale = linkbytes.NUM_PARAMETERS * 4 / 100_224
    assert {link: num_bytes * scale for link, num_bytes in sent.links.items()} == pytest.approx(drawn)


def test_drawn_steps_of_a_unit_equal_the_recorded_run() -> None:
    steps = [hooksteps.Step(hook) for hook in hooksteps.TITLES]
    own = [[kind for kind, unit, begins, _ in one.happened if unit == hooksteps.UNIT and begins] for one in steps]
    assert own == [["AG", "F"], ["FREE"], ["B", "AG"], ["FREE", "RS"], []]
    assert [step.is_whole for step in steps] == [True, False, True, False, False]
    assert [step.is_reducing for step in steps] == [False, False, False, True, False]
    assert [bool(step.gradient) for step in steps] == [False] * 4 + [True]


def test_activations_are_drawn_above_stored_and_unsharded_memory() -> None:
    plain, checkpointed = memorycurve.simulated("none"), memorycurve.simulated("full")
    assert plain.result.stored_bytes == checkpointed.result.stored_bytes
    assert plain.peak == plain.result.peak_allocated > 1.5 * checkpointed.peak
    assert f"peak {size_of(plain.peak)}" in memorycurve.draw("")
