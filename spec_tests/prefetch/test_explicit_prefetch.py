"""Prefetching: implicit, by explicit lists, and manual.

A `Watch` records which blocks are in memory during each unit's forward and backward; the tracer records the order in
which operations are issued. Complete event orders without explicit lists are in ``test_timelines.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models import apis, running
from spec_tests.models.modules import seeded
from spec_tests.models.values import assert_same
from spec_tests.subject import trace


def ahead(model: Any, num: int) -> Any:
    """Each block prefetches the next ``num`` blocks, in the order in which they are needed."""
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + num])
        block.set_modules_to_backward_prefetch(blocks[max(index - num, 0) : index][::-1])
    return model


def words_of(model: nn.Module, step: int = 0) -> list[str]:
    return running.recorded_iteration(model, step).split()


# --- implicit ---


@pytest.mark.spec("FS2-PREF-02")
@ranks(2)
def test_unit_used_twice_is_prefetched_twice_in_that_order() -> None:
    model = apis.FULLY_SHARD.shard()
    for _ in range(2):
        loss = model(running.batch(), order=(0, 1, 2, 0)).square().mean()
        with trace.record() as recorder:
            loss.backward()
        words = [event.kind + (event.unit.removeprefix("blocks.") or "R") for event in recorder.events]
        assert [word for word in words if word[:2] == "AG"] == ["AG0", "AG2", "AG1", "AG0"]
        assert words.index("AG0") < words.index("B0") < words.index("AG2") < words.index("FREE0")


# --- explicit lists ---


@pytest.mark.spec("FS2-PREF-03", "FS2-PREF-04", "FS2-PREF-09", "MIG-13")
@pytest.mark.proof("order only")
@pytest.mark.parametrize(
    ("num_ahead", "forward", "backward"),
    [
        (
            1,
            "AGR AG0 AG1 F0 FREE0 AG2 F1 FREE1 AG3 F2 FREE2 F3 FREE3 keepR",
            "AG3 B3 AG2 FREE3 RS3 B2 AG1 FREE2 RS2 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR",
        ),
        (
            2,
            "AGR AG0 AG1 AG2 F0 FREE0 AG3 F1 FREE1 F2 FREE2 F3 FREE3 keepR",
            "AG3 B3 AG2 AG1 FREE3 RS3 B2 AG0 FREE2 RS2 B1 FREE1 RS1 B0 FREE0 RS0 FREER RSR",
        ),
    ],
)
@ranks(2)
def test_full_iteration_prefetching_some_units(num_ahead: int, forward: str, backward: str) -> None:
    """An explicit all-gather is issued one layer earlier than an implicit one (see ``test_timelines.py``)."""
    model = ahead(apis.FULLY_SHARD.shard(), num_ahead)
    for step in range(3):
        assert running.recorded_iteration(model, step) == f"{forward} | {backward}"


@pytest.mark.spec("FS2-PREF-03")
@pytest.mark.parametrize("trains", [True, False])
@ranks(2)
def test_forward_prefetch_list_is_issued_in_order_before_the_layer_runs(trains: bool) -> None:
    model = apis.FULLY_SHARD.shard()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[1]])
    with trace.record() as recorder, torch.set_grad_enabled(trains):
        model(running.batch())
    words = running.said(recorder.events).split()
    assert words[: words.index("F0") + 1] == ["AGR", "AG0", "AG2", "AG1", "F0"]


@pytest.mark.spec("FS2-PREF-04")
@ranks(2)
def test_backward_prefetch_list_replaces_implicit_prefetch_and_empty_list_restores_it() -> None:
    model = apis.FULLY_SHARD.shard()
    model.blocks[3].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[2]])
    words = words_of(model)
    assert words[words.index("B3") :][:5] == ["B3", "AG1", "AG2", "FREE3", "RS3"]
    model.blocks[3].set_modules_to_backward_prefetch([])
    words = words_of(model)
    assert words[words.index("B3") :][:4] == ["B3", "AG2", "FREE3", "RS3"]


@pytest.mark.spec("FS2-PREF-03")
@ranks(2)
def test_root_may_prefetch_its_first_blocks() -> None:
    model = apis.FULLY_SHARD.shard()
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    words = words_of(model)
    assert words[: words.index("F1")] == ["AGR", "AG0", "AG1", "F0", "FREE0"]


@pytest.mark.spec("FS2-17", "FS2-PREF-02", "FS2-PREF-05")
@pytest.mark.parametrize("num_ahead", [None, 1, 2])
@ranks(2)
def test_only_the_current_block_has_unsharded_parameters_during_each_computation(num_ahead: int | None) -> None:
    """A prefetched all-gather has one buffer. Its block gets the memory of its parameters when it is used."""
    plain = seeded()
    watch = running.Watch(plain)
    alive: dict[str, list[str]] = {}
    watch.in_forward = lambda unit: alive.update({f"F {unit}": watch.alive_blocks()})
    watch.in_backward = lambda unit: alive.update({f"B {unit}": watch.alive_blocks()})
    model = apis.FULLY_SHARD.shard(plain)
    if num_ahead is not None:
        ahead(model, num_ahead)
    running.iterate(model)
    running.iterate(model, 1)
    for block in (f"blocks.{index}" for index in range(4)):
        assert alive[f"F {block}"] == [block]
        assert alive[f"B {block}"] == [block]
    assert watch.alive() == []


@pytest.mark.spec("FS2-PREF-06", "MIG-13")
@ranks(2)
def test_manually_unsharded_root_is_not_all_gathered_again() -> None:
    for asynchronous in (False, True):
        model = apis.FULLY_SHARD.shard()
        for step in range(2):
            with trace.record() as recorder:
                model.unshard(async_op=asynchronous)
                loss = running.iterate(model, step)
            assert recorder.order("AG")[0] == "AG"
            assert recorder.order("AG").count("AG") == 1
            assert loss == running.iterate(apis.FULLY_SHARD.shard(), step)


@pytest.mark.spec("FS2-PREF-06", "FS2-20")
@ranks(2)
def test_forward_may_prefetch_blocks_manually() -> None:
    model = apis.FULLY_SHARD.shard()
    for index in range(3):
        following = model.blocks[index + 1]
        model.blocks[index].linear.register_forward_pre_hook(
            lambda *_, following=following: following.unshard(async_op=True) and None
        )
    words = words_of(model)
    assert words[:7] == ["AGR", "AG0", "F0", "AG1", "FREE0", "F1", "AG2"]


@pytest.mark.spec("FS2-PREF-07")
@ranks(2)
def test_prefetch_list_accepts_only_fsdp_modules() -> None:
    model = apis.FULLY_SHARD.shard()
    for wrong in (nn.Linear(2, 2), "blocks.1", None, model.enter):
        for setter in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
            with pytest.raises(ValueError, match="FSDPModule"):
                setter([model.blocks[0], wrong])


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "two ahead": lambda model: ahead(model, 2),
    "wrong way": lambda model: [
        block.set_modules_to_forward_prefetch([model.blocks[index - 1]])
        or block.set_modules_to_backward_prefetch([model.blocks[(index + 1) % 4]])
        for index, block in enumerate(model.blocks)
    ],
    "oneself": lambda model: [block.set_modules_to_forward_prefetch([block]) for block in model.blocks],
    "the last one": lambda model: model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3]]),
}


@pytest.mark.spec("FS2-PREF-08")
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_prefetch_settings_do_not_change_results_also_for_blocks_that_do_not_run(setting: str) -> None:
    model, usual = apis.FULLY_SHARD.shard(), apis.FULLY_SHARD.shard()
    SETTINGS[setting](model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, usual)]
    for step, order in enumerate(((0, 1, 2, 3), (0, 1, 2), (3,), (0, 3))):
        assert running.iterate(model, step, order=order) == running.iterate(usual, step, order=order)
        assert_same(apis.FULLY_SHARD.gradients(model), apis.FULLY_SHARD.gradients(usual))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
