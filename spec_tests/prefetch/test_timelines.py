"""Compares the complete order of events. A missing, additional or misplaced event fails the test.

The model has four equal blocks, 0 to 3, and a root R with its own parameters. ``B`` is the time when the gradient of a
block's output arrives. The bar separates forward from backward. ``keepR`` means that the root stays unsharded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import device, ranks
from spec_tests.models import apis, running
from spec_tests.models.apis import FULLY_SHARD, WRAPPED
from spec_tests.subject import BackwardPrefetch, ShardingStrategy, trace

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy

# Each block is all-gathered, computes and is freed, and the same without the root, which stays unsharded.
BLOCKS = "AG0 F0 FREE0 AG1 F1 FREE1 AG2 F2 FREE2 AG3 F3 FREE3"
FORWARD = f"AGR {BLOCKS} keepR"
FORWARD_AHEAD = "AGR AG0 AG1 F0 FREE0 AG2 F1 FREE1 AG3 F2 FREE2 F3 FREE3 keepR"
BACKWARD = {
    PRE: "AG3 B3 AG2 FREE3 RS3 B2 AG1 FREE2 RS2 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR",
    POST: "B3 AG3 FREE3 AG2 RS3 B2 FREE2 AG1 RS2 B1 FREE1 AG0 RS1 B0 FREE0 RS0 FREER RSR",
    None: "B3 AG3 FREE3 RS3 B2 AG2 FREE2 RS2 B1 AG1 FREE1 RS1 B0 AG0 FREE0 RS0 FREER RSR",
}
COMPUTES = "F0 F1 F2 F3"
KEPT_FORWARD = "AGR AG0 F0 AG1 F1 AG2 F2 AG3 F3 keepR"
KEPT_BACKWARD = "B3 FREE3 RS3 B2 FREE2 RS2 B1 FREE1 RS1 B0 FREE0 RS0 FREER RSR"


@pytest.mark.spec("CTOR-16", "SHARD-04", "SHARD-05", "SHARD-16", "PREF-02", "PREF-04", "PREF-06", "WRAP-17")
@pytest.mark.parametrize("prefetch", [PRE, POST, None])
@ranks(2)
def test_full_iteration_of_full_shard(prefetch: BackwardPrefetch | None) -> None:
    model = WRAPPED.shard(backward_prefetch=prefetch)
    for step in range(3):
        assert running.recorded_iteration(model, step) == f"{FORWARD} | {BACKWARD[prefetch]}"


@pytest.mark.spec("FS2-09", "FS2-17", "FS2-21", "FS2-PREF-01", "FS2-PREF-02", "FS2-26")
@pytest.mark.parametrize(
    ("reshard_after_forward", "expected"),
    [
        (None, f"{FORWARD} | {BACKWARD[PRE]}"),
        (True, f"AGR {BLOCKS} FREER | AGR {BACKWARD[PRE]}"),
        (False, f"{KEPT_FORWARD} | {KEPT_BACKWARD}"),
    ],
)
@ranks(2)
def test_full_iteration_of_fully_shard(reshard_after_forward: bool | None, expected: str) -> None:
    model = FULLY_SHARD.shard(reshard_after_forward=reshard_after_forward)
    for step in range(3):
        assert running.recorded_iteration(model, step) == expected


@pytest.mark.spec("SHARD-08", "SHARD-11", "SHARD-16", "PREF-15")
@pytest.mark.parametrize("prefetch", [PRE, POST, None])
@ranks(2)
def test_full_iteration_without_all_gathers_in_backward(prefetch: BackwardPrefetch | None) -> None:
    kept = WRAPPED.shard(strategy=SHARD_GRAD_OP, backward_prefetch=prefetch)
    replicated = WRAPPED.shard(strategy=NO_SHARD, backward_prefetch=prefetch)
    for step in range(3):
        assert running.recorded_iteration(kept, step) == f"{KEPT_FORWARD} | {KEPT_BACKWARD}"
        assert running.recorded_iteration(replicated, step) == f"{COMPUTES} | B3 AR3 B2 AR2 B1 AR1 B0 AR0 ARR"


@pytest.mark.spec("SHARD-10", "NOSYNC-01", "NOSYNC-08")
@ranks(2)
def test_shard_grad_op_all_gathers_once_under_no_sync() -> None:
    model = WRAPPED.shard(strategy=SHARD_GRAD_OP)
    with model.no_sync():
        assert running.recorded_iteration(model, 0) == f"{KEPT_FORWARD} | B3 B2 B1 B0"
        assert running.recorded_iteration(model, 1) == f"{COMPUTES} | B3 B2 B1 B0"
    assert running.recorded_iteration(model, 2) == f"{COMPUTES} | {KEPT_BACKWARD}"
    assert running.recorded_iteration(model, 3) == f"{KEPT_FORWARD} | {KEPT_BACKWARD}"


@pytest.mark.api_spec(wrapper=["NOSYNC-01", "NOSYNC-08"], fully_shard=["FS2-SYNC-01", "MIG-16"])
@apis.both_apis
@ranks(2)
def test_full_shard_under_no_sync_all_gathers_without_reduction(api: Any) -> None:
    model = api.shard()
    silent = " ".join(word for word in BACKWARD[PRE].split() if not word.startswith("RS"))
    with api.no_sync(model):
        for step in range(2):
            assert running.recorded_iteration(model, step) == f"{FORWARD} | {silent}"
    assert running.recorded_iteration(model, 2) == f"{FORWARD} | {BACKWARD[PRE]}"


# With streams, the all-reduce follows its reduce-scatter immediately, because a stream can wait for another stream.
# Without them a thread would block, so the all-reduce is issued after the next unit's reduce-scatter has started.
HYBRID_BACKWARD = {
    "accelerator": "AG3 B3 AG2 FREE3 RS3 AR3 B2 AG1 FREE2 RS2 AR2 B1 AG0 FREE1 RS1 AR1 B0 FREE0 RS0 AR0 FREER RSR ARR",
    "cpu": "AG3 B3 AG2 FREE3 RS3 B2 AG1 FREE2 RS2 AR3 B1 AG0 FREE1 RS1 AR2 B0 FREE0 RS0 AR1 FREER RSR AR0 ARR",
}


@pytest.mark.api_spec(wrapper=["HYB-01", "HYB-04", "HYB-06"], fully_shard=["FS2-18"])
@pytest.mark.parametrize("strategy", [HYBRID_SHARD, HYBRID_SHARD_ZERO2])
@apis.both_apis
@ranks(4)
def test_full_iteration_of_hybrid_on_two_by_two_mesh(api: Any, strategy: ShardingStrategy) -> None:
    model = api.shard(strategy=strategy)
    backward = HYBRID_BACKWARD["cpu" if device().type == "cpu" else "accelerator"]
    if strategy is HYBRID_SHARD:
        expected = f"{FORWARD} | {backward}"
    else:
        expected = f"{KEPT_FORWARD} | " + " ".join(word for word in backward.split() if not word.startswith("AG"))
    for step in range(2):
        assert running.recorded_iteration(model, step) == expected


@pytest.mark.spec("PREF-11", "PREF-12")
@pytest.mark.parametrize("prefetch", [PRE, POST, None])
@ranks(2)
def test_forward_prefetch_begins_in_the_second_iteration_and_does_not_change_backward(
    prefetch: BackwardPrefetch | None,
) -> None:
    model = WRAPPED.shard(forward_prefetch=True, backward_prefetch=prefetch)
    assert running.recorded_iteration(model, 0) == f"{FORWARD} | {BACKWARD[prefetch]}"
    for step in (1, 2):
        assert running.recorded_iteration(model, step) == f"{FORWARD_AHEAD} | {BACKWARD[prefetch]}"


@pytest.mark.api_spec(wrapper=["SHARD-14", "FRESH-03"], fully_shard=["FS2-17", "FRESH-03"])
@pytest.mark.parametrize(
    ("api", "options", "first", "again"),
    [
        (WRAPPED, {"strategy": FULL_SHARD}, f"AGR {BLOCKS}", BLOCKS),
        (WRAPPED, {"strategy": SHARD_GRAD_OP}, "AGR AG0 F0 AG1 F1 AG2 F2 AG3 F3", COMPUTES),
        (WRAPPED, {"strategy": NO_SHARD}, COMPUTES, COMPUTES),
        (FULLY_SHARD, {}, f"AGR {BLOCKS}", BLOCKS),
        (FULLY_SHARD, {"reshard_after_forward": False}, "AGR AG0 F0 AG1 F1 AG2 F2 AG3 F3", COMPUTES),
        (FULLY_SHARD, {"reshard_after_forward": True}, f"AGR {BLOCKS} FREER", f"AGR {BLOCKS} FREER"),
    ],
)
@ranks(2)
def test_full_evaluation_order(api: Any, options: dict[str, Any], first: str, again: str) -> None:
    """Units that are not resharded stay unsharded for the next evaluation. By default, this is only the root."""
    model = api.shard(**options).eval()
    for expected in (first, again, again):
        with trace.record() as recorder, torch.no_grad():
            model(running.batch())
        assert running.said(recorder.events) == expected


@pytest.mark.spec("WRAP-17")
@ranks(2)
def test_one_unit_prefetches_nothing() -> None:
    """The other tests show that several units communicate between computations."""
    alone = WRAPPED.shard(unit_classes=(), forward_prefetch=True)
    for step in range(2):
        with trace.record() as recorder:
            running.iterate(alone, step)
        assert recorder.order() == ["AG", "F", "B", "FREE", "RS"]
