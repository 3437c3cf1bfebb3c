"""The complete order of events in an iteration, and the number of collectives per step.

The model has four equal blocks 0 to 3 and a root R with parameters of its own. ``B`` marks the time when the gradient
of a block's output is ready. The bar separates forward and backward. ``keepR`` before the bar means that R stays
unsharded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from spec_tests import oracles
from spec_tests.harness import ranks
from spec_tests.models import MODELS, apis, running
from spec_tests.models.modules import wide
from spec_tests.subject import ShardingStrategy, fully_shard, trace

FORWARD = "AGR AG0 F0 FREE0 AG1 F1 FREE1 AG2 F2 FREE2 AG3 F3 FREE3"
BACKWARD = "AG3 B3 AG2 FREE3 RS3 B2 AG1 FREE2 RS2 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR"
KEPT_FORWARD = "AGR AG0 F0 AG1 F1 AG2 F2 AG3 F3 keepR"
KEPT_BACKWARD = "B3 FREE3 RS3 B2 FREE2 RS2 B1 FREE1 RS1 B0 FREE0 RS0 FREER RSR"
WHOLE = {
    None: f"{FORWARD} keepR | {BACKWARD}",
    True: f"{FORWARD} FREER | AGR {BACKWARD}",
    False: f"{KEPT_FORWARD} | {KEPT_BACKWARD}",
}


# --- whole iterations ---


@pytest.mark.spec("FS2-09", "FS2-17", "FS2-21", "FS2-PREF-01", "FS2-PREF-02", "FS2-26")
@pytest.mark.parametrize("reshard_after_forward", WHOLE)
@ranks(2)
def test_full_iteration_order(reshard_after_forward: bool | None) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=reshard_after_forward)
    for step in range(3):
        assert running.recorded_iteration(model, step) == WHOLE[reshard_after_forward]


# With streams, the all-reduce directly follows its reduce-scatter, because a stream can wait for another stream.
# Without them a thread would block, so the all-reduce may be issued after the next unit's reduce-scatter was started.
GRID_BACKWARD = "AG3 B3 AG2 FREE3 RS3 AR3 B2 AG1 FREE2 RS2 AR2 B1 AG0 FREE1 RS1 AR1 B0 FREE0 RS0 AR0 FREER RSR ARR"


@pytest.mark.spec("FS2-18")
@ranks(4)
def test_full_iteration_on_two_by_two_mesh() -> None:
    model = apis.FULLY_SHARD.shard(strategy=ShardingStrategy.HYBRID_SHARD)
    for step in range(2):
        words = running.recorded_iteration(model, step).split()
        reductions = [word for word in words if word.startswith("AR") and word != "AR"]
        assert [word for word in words if word not in reductions] == WHOLE[None].split()
        assert reductions == ["AR3", "AR2", "AR1", "AR0", "ARR"]
        if running.batch().device.type == "cuda":
            assert " ".join(words) == f"{FORWARD} keepR | {GRID_BACKWARD}"
        for word in reductions:
            assert words.index(word) > words.index(word.replace("AR", "RS"))


@pytest.mark.spec("FS2-SYNC-01", "MIG-16")
@ranks(2)
def test_iteration_without_gradient_sync_only_omits_the_reductions() -> None:
    model = apis.FULLY_SHARD.shard()
    silent = " ".join(word for word in WHOLE[None].split() if not word.startswith("RS"))
    model.set_requires_gradient_sync(False)
    for step in range(2):
        assert running.recorded_iteration(model, step) == silent
    model.set_requires_gradient_sync(True)
    assert running.recorded_iteration(model, 2) == WHOLE[None]


@pytest.mark.spec("FS2-17", "FRESH-03")
@pytest.mark.parametrize("reshard_after_forward", WHOLE)
@ranks(2)
def test_full_evaluation_order(reshard_after_forward: bool | None) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=reshard_after_forward).eval()
    first = WHOLE[reshard_after_forward].split(" |")[0]
    # Units that are not resharded stay unsharded for the next evaluation. By default, this is only the root.
    first = first.replace(" keepR", "")
    again = {None: first.removeprefix("AGR "), False: "F0 F1 F2 F3", True: first}[reshard_after_forward]
    for expected in (first, again, again):
        with trace.record() as recorder, torch.no_grad():
            model(running.batch())
        assert running.said(recorder.events) == expected


@pytest.mark.spec("FS2-09", "FS2-13", "FS2-17")
@pytest.mark.parametrize("reshard_after_forward", WHOLE)
@ranks(2)
def test_the_collectives_are_those_of_torch_in_the_same_order(reshard_after_forward: bool | None) -> None:
    ours, theirs = wide(), wide()
    apis.FULLY_SHARD.shard(ours, reshard_after_forward=reshard_after_forward)
    for module in (*theirs.blocks, theirs):
        torch_fsdp.fully_shard(module, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with running.Wire() as wire_of_ours:
            running.iterate(ours, step)
        with running.Wire() as wire_of_theirs:
            running.iterate(theirs, step)
        assert wire_of_ours.values == wire_of_theirs.values


# --- counts: all-gathers and reduce-scatters in a step of three blocks ---

COUNTS = {
    "blocks": (6, 3),
    "called_twice": (12, 3),
    "several_forwards": (11, 3),
    "checkpoint_inside": (6, 3),
    "checkpoint_inside_reentrant": (6, 3),
    "checkpoint_outside": (6, 3),
    "checkpoint_outside_reentrant": (6, 3),
}


def usual_step(library: Any, name: str, **options: Any) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a step, measured after steps in which every unit was used."""
    model, recipe = oracles.shard_fsdp2(library, MODELS[name], **options), oracles.Recipe()
    for step in (0, 1):
        oracles.forward_backward(model, MODELS[name], recipe, dist.get_rank(), step)
    with oracles.count_collectives() as counts:
        oracles.forward_backward(model, MODELS[name], recipe, dist.get_rank(), 1)
    return counts.gathers_and_reductions


@pytest.mark.spec("FS2-17", "PAR-07")
@pytest.mark.parametrize("name", COUNTS)
@ranks(2)
def test_step_of_three_blocks_has_expected_number_of_collectives(name: str) -> None:
    assert usual_step(fully_shard, name) == COUNTS[name]


# Those whose numbers of collectives the tests above do not state: other graphs, and units that are used several times.
COMPARED = [
    "nested",
    "tied",
    "shared_module",
    "several_forwards",
    "sometimes",
    "frozen",
    "unused",
    "lstm",
    "transformer",
]


@pytest.mark.spec("FS2-17", "PAR-03")
@pytest.mark.parametrize("name", COMPARED)
@ranks(2)
def test_no_model_takes_more_collectives_than_in_torch(name: str) -> None:
    ours, theirs = usual_step(fully_shard, name), usual_step(torch_fsdp.fully_shard, name)
    assert ours[0] <= theirs[0], "gathers"
    assert ours[1] == theirs[1], "reductions"
