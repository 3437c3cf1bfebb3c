"""Methods of `FSDPModule` that change when a unit is resharded and unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import sharded
from spec_tests.subject import fully_shard, trace


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_reshard_after_forward_is_switchable() -> None:
    model = sharded()
    for choice in (True, False, True):
        model.set_reshard_after_forward(choice)
        with trace.record() as recorder:
            model(batch()).sum().backward()
        # The root and four blocks: once in forward and, if they are resharded after it, once in backward.
        assert (recorder.count("AG"), recorder.count("FREE")) == ((10, 10) if choice else (5, 5))
    model.blocks[2].set_reshard_after_forward(False)
    with trace.record() as recorder:
        model(batch())
    assert recorder.order("FREE") == ["FREE blocks.0", "FREE blocks.1", "FREE blocks.3", "FREE"]


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("choice", ["yes", 2, None])
@ranks(2)
def test_set_reshard_after_forward_requires_bool(choice: Any) -> None:
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        sharded().set_reshard_after_forward(choice)


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("setting", ["set_reshard_after_forward", "set_reshard_after_backward"])
@ranks(2)
def test_units_inside_are_freed_if_the_root_alone_is_not(setting: str) -> None:
    model = sharded(reshard_after_forward=True)
    getattr(model, setting)(False, recurse=False)
    with trace.record() as recorder:
        model(batch()).sum().backward()
    freed = recorder.order("FREE")
    assert [freed.count(f"FREE blocks.{index}") for index in range(4)] == [2, 2, 2, 2]
    assert freed.count("FREE") == 1


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_kept_params_need_no_all_gather_in_next_forward() -> None:
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for num_gathers in (5, 0, 0):
        with trace.record() as recorder:
            model(batch()).sum().backward()
        assert (recorder.count("AG"), recorder.count("FREE"), recorder.count("RS")) == (num_gathers, 0, 5)
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert recorder.order("AG", "FREE") == [], "an evaluation does not free them"
    model.set_reshard_after_backward(True)
    model(batch()).sum().backward()
    assert {type(p.data) for p in model.parameters()} == {DTensor}


@pytest.mark.spec("NEW-11")
@ranks(2)
def test_group_unneeded_in_backward_is_not_all_gathered_there() -> None:
    """The setting does not change inner modules: the linear layer is needed for the gradient of the embedding."""
    model, plain = (seeded(lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))) for _ in range(2))
    fully_shard(model[1], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True).set_unshard_in_backward(False)
    tokens = torch.arange(3, device=device())
    with trace.record() as recorder:
        model(tokens).square().mean().backward()
    assert recorder.order("AG", "RS") == ["AG", "AG 1", "AG 1", "RS 1", "RS"]
    model.zero_grad()
    assert_trains_like(model, plain, loss=lambda each, x: (each(tokens) * x[0, :4]).square().mean())
