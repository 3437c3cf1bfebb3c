"""The rate limiter: limits how far the CPU's all-gathers can run ahead of the device.

On the CPU, memory is free as soon as a unit is resharded, so the CPU never waits. These tests simulate a slow device:
memory that the engine frees stays in use until the CPU waits for its event, as on a GPU that is still computing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from minifsdp.engine import lifetime
from spec_tests.harness import ranks
from spec_tests.models import apis, running
from spec_tests.models.modules import seeded
from spec_tests.models.values import assert_same
from spec_tests.subject import BackwardPrefetch, FullyShardedDataParallel, trace


@contextmanager
def slow_device() -> Iterator[tuple[list[int], list[int]]]:
    """A device that frees memory only when the CPU waits for it.

    Yields:
        The numbers of the releases that the device has not reached yet, and of those that the CPU has waited for.
    """
    in_use: list[int] = []
    waited_for: list[int] = []
    numbers, release = itertools.count(), lifetime.release

    def slow_release(owner: torch.Tensor) -> Any:
        release(owner)
        number = next(numbers)
        in_use.append(number)

        def synchronize() -> None:
            waited_for.append(number)
            # A device works in order, so all earlier releases are complete too.
            in_use[:] = [other for other in in_use if other > number]

        return SimpleNamespace(query=lambda: number not in in_use, synchronize=synchronize)

    with mock.patch.object(lifetime, "release", slow_release):
        yield in_use, waited_for


# --- with the limit ---


@pytest.mark.spec("LIM-01", "LIM-02")
@ranks(2)
def test_by_default_the_third_all_gather_waits_for_the_oldest_release() -> None:
    model = apis.WRAPPED.shard()
    assert {unit.limit_all_gathers for unit in FullyShardedDataParallel.fsdp_modules(model)} == {True}
    with slow_device() as (_, waited_for), trace.record() as recorder, torch.no_grad():
        model(running.batch())
    assert running.said(recorder.events, waits=True) == (
        "AGR AG0 F0 FREE0 AG1 F1 FREE1 WAIT2 AG2 F2 FREE2 WAIT3 AG3 F3 FREE3"
    )  # fmt: skip
    assert waited_for == [0, 1], "the releases of blocks 0 and 1"


@pytest.mark.spec("LIM-02", "LIM-06")
@pytest.mark.parametrize(("limit", "expected"), [(True, [1, 2, 2, 2]), (False, [1, 2, 3, 4])])
@ranks(2)
def test_forward_uses_memory_of_at_most_two_units_with_the_limit_and_of_all_units_without_it(
    limit: bool, expected: list[int]
) -> None:
    """Counts the unsharded blocks, and the resharded blocks whose memory the device has not released yet."""
    plain = seeded()
    watch = running.Watch(plain)
    model = apis.WRAPPED.shard(plain, limit_all_gathers=limit)
    found: list[int] = []
    watch.in_forward = lambda unit: found.append(len(watch.alive_blocks()) + len(in_use)) if unit else None
    with slow_device() as (in_use, _):
        running.iterate(model)
    assert found == expected


@pytest.mark.spec("LIM-02")
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
@pytest.mark.parametrize("forward_prefetch", [False, True])
@ranks(2)
def test_all_gather_leaves_at_most_one_open_release(prefetch: BackwardPrefetch | None, forward_prefetch: bool) -> None:
    """One pending release and one unsharded unit count as two units in use, in forward and in backward."""
    model = apis.WRAPPED.shard(backward_prefetch=prefetch, forward_prefetch=forward_prefetch)
    open_releases: list[int] = []
    with slow_device() as (in_use, _), trace.record() as recorder:
        begin = recorder.begin

        def looking(kind: str, unit: str, **rest: object) -> trace.Event:
            if kind == "AG":
                open_releases.append(len(in_use))
            return begin(kind, unit, **rest)

        with mock.patch.object(trace.Recorder, "begin", lambda self, *args, **rest: looking(*args, **rest)):
            for step in range(3):
                running.iterate(model, step)
    assert max(open_releases) == 1


@pytest.mark.spec("LIM-02", "NEW-15")
@ranks(2)
def test_a_forward_after_an_error_waits_for_no_release_of_the_failed_one() -> None:
    model = apis.WRAPPED.shard()
    with slow_device() as (in_use, waited_for):
        with pytest.raises(IndexError, match="out of range"):
            model(running.batch(), order=(0, 1, 2, 9))
        failed = set(in_use)
        assert failed, "the failed forward has released units"
        with torch.no_grad():
            model(running.batch())
        assert failed.isdisjoint(waited_for)


# --- without the limit ---


@pytest.mark.spec("LIM-03", "LIM-05")
@ranks(2)
def test_without_the_limit_the_cpu_never_waits_and_the_results_are_the_same() -> None:
    results = []
    for limit_all_gathers in (True, False):
        model = apis.WRAPPED.shard(limit_all_gathers=limit_all_gathers)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with slow_device() as (_, waited_for), trace.record() as recorder:
            for step in range(3):
                running.iterate(model, step, optimizer)
        assert (recorder.count("WAIT") > 0) is bool(waited_for) is limit_all_gathers
        assert recorder.count("AG") == 27
        results.append(apis.WRAPPED.values(model))
    assert_same(*results, bitwise=True)
