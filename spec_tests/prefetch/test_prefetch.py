"""Prefetching and communication streams that both APIs have in common.

Options and methods of one API are in ``prefetch/test_wrapper_prefetch.py`` and ``prefetch/test_explicit_prefetch.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minifsdp.engine.events import events
from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.models.modules import seeded
from spec_tests.models.running import Watch, backward_words, iterate
from spec_tests.subject import trace


@pytest.mark.api_spec(wrapper=["PREF-02", "PREF-09"], fully_shard=["FS2-PREF-02"])
@apis.both_apis
@ranks(2)
def test_pre_prefetch_all_gathers_before_current_gradients(api: Any) -> None:
    plain = seeded()
    watch = Watch(plain)
    watch.in_backward = lambda unit: events.recorder.begin("GRAD", unit) and None
    words = backward_words(api.shard(plain))
    assert words.index("AG3") < words.index("B3"), "the root starts them"
    for index in (3, 2, 1):
        gather_of_next = words.index(f"AG{index - 1}")
        assert words.index(f"B{index}") < gather_of_next < words.index(f"GRAD{index}")


@pytest.mark.api_spec(wrapper=["PREF-08"], fully_shard=["FS2-PREF-02"])
@pytest.mark.parametrize("orders", [[(2, 0, 3, 1)], [(0, 1, 2, 3), (3, 1, 0, 2)], [(1, 2), (3, 0, 2)]])
@apis.both_apis
@ranks(2)
def test_backward_prefetch_follows_the_reverse_forward_order_of_this_iteration(
    api: Any, orders: Sequence[Sequence[int]]
) -> None:
    model = api.shard()
    for step, order in enumerate(orders):
        words = backward_words(model, step, order=order)
        expected = [f"AG{order[-1]}"]
        for position in reversed(range(len(order))):
            expected += [f"B{order[position]}"] + ([f"AG{order[position - 1]}"] if position else [])
        assert [word for word in words if word.startswith(("AG", "B"))] == expected


@pytest.mark.api_spec(wrapper=["PREF-14"], fully_shard=["FS2-PREF-01"])
@apis.both_apis
@ranks(2)
def test_collectives_are_issued_on_labelled_comm_streams(api: Any) -> None:
    """``streams/test_order.py`` checks the streams of an accelerator, on which the collectives really run."""
    model = api.shard()
    iterate(model)
    with trace.record() as recorder:
        iterate(model)
    found = {(event.kind, event.stream) for event in recorder.events if event.kind in ("AG", "F", "B", "RS")}
    assert found == {("AG", "gather"), ("F", "compute"), ("B", "compute"), ("RS", "reduce")}
