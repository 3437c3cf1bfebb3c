"""Which unit forward prefetches: the one that followed it in the first iteration. A warning is an error here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.models.running import batch, said
from spec_tests.subject import FullyShardedDataParallel, trace

AHEAD = "AG0 AG1 F0 AG2 F1 AG3 F2 F3"
"""Each block is all-gathered before the block in front of it computes."""


def step(model: nn.Module, order: Sequence[int] = (0, 1, 2, 3)) -> str:
    """The all-gathers and forwards of the blocks in one iteration, which runs the blocks in this order."""
    with trace.record() as recorder:
        loss = model(batch(), order=order).square().mean()
    loss.backward()
    words = said(recorder.events).split()
    return " ".join(word for word in words if not word.startswith("FREE") and word != "AGR")


@pytest.mark.spec("PREF-12")
@ranks(2)
def test_order_of_the_first_iteration_stays_permanently() -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    step(model)
    with pytest.warns(UserWarning, match="runs where"):
        step(model, (3, 2, 1, 0))
    assert step(model) == AHEAD


@pytest.mark.spec("PREF-12")
@ranks(2)
def test_an_evaluation_records_and_prefetches_nothing() -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    for is_recorded in (False, True):
        with torch.no_grad(), trace.record() as recorder:
            model(batch(), order=(3, 2, 1, 0))
        words = said(recorder.events).split()
        assert [words.index(f"F{index}") - words.index(f"AG{index}") for index in range(4)] == [1] * 4
        assert (step(model) == AHEAD) is is_recorded


@pytest.mark.spec("PREF-12", "PREF-13")
@pytest.mark.parametrize("moment", ["in the first iteration", "later"])
@ranks(2)
def test_an_iteration_that_an_exception_ends_leaves_no_order_and_no_position(moment: str) -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    if moment == "later":
        step(model)
    with pytest.raises(IndexError, match="out of range"):
        model(batch(), order=(0, 1, 9) if moment == "later" else (3, 1, 9))
    step(model)
    assert step(model) == AHEAD


@pytest.mark.spec("PREF-12")
@ranks(2)
def test_a_forward_with_summoned_parameters_records_nothing() -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    with FullyShardedDataParallel.summon_full_params(model):
        model(batch(), order=(3, 2, 1, 0))
    step(model)
    assert step(model) == AHEAD


@pytest.mark.spec("PREF-12", "PREF-13")
@pytest.mark.parametrize(
    ("order", "expected"),
    # A block is resharded after each call, so its second call all-gathers it again.
    [((0, 0, 1, 1), "AG0 AG1 F0 AG0 F0 F1 AG1 F1"), ((0, 1, 0, 2), "AG0 AG1 F0 AG2 F1 AG0 AG1 F0 F2")],
    ids=str,
)
@ranks(2)
def test_unit_called_twice_keeps_the_successor_of_its_first_call(order: Sequence[int], expected: str) -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    step(model, order)
    assert step(model, order) == expected


@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ((0, 1, 2), (1, 0, 2), "'blocks.1' runs where 'blocks.0' was expected"),
        ((0,), (0, 1), "'blocks.1' runs where 'none' was expected"),
        ((0, 1), (0, 2), "'blocks.2' runs where 'blocks.1' was expected"),
    ],
)
@ranks(2)
def test_another_order_or_a_new_unit_gives_one_warning_with_both_names(
    first: Sequence[int], later: Sequence[int], message: str
) -> None:
    model = apis.WRAPPED.shard(forward_prefetch=True)
    step(model, first)
    with pytest.warns(UserWarning, match=message) as caught:
        step(model, later)
    step(model, later)
    assert len(caught) == 1
    assert "forward_prefetch off" in str(caught[0].message)
