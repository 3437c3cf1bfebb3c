"""Changes of a model while some of its units are unsharded by hand, or before they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded
from spec_tests.subject import fully_shard, trace


@pytest.mark.spec("FS2-19", "FS2-SD-03")
@ranks(2)
def test_unshard_after_a_load_that_assigns_has_the_assigned_values() -> None:
    model = sharded()
    iterate(model)
    model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()}, assign=True)
    model.blocks[1].unshard()
    expected = 2 * seeded().blocks[1].linear.weight
    assert torch.equal(model.blocks[1].linear.weight, expected)


@pytest.mark.spec("FS2-19", "GRAD-04")
@ranks(2)
def test_a_conversion_of_unsharded_units_converts_their_shards() -> None:
    model, plain = sharded(), seeded().double()
    for module in (model, *model.blocks):
        module.unshard()
    model.double()
    assert {(type(parameter.data), parameter.dtype) for parameter in model.parameters()} == {(DTensor, torch.float64)}
    torch.testing.assert_close(model(batch().double()), plain(batch().double()))


@pytest.mark.spec("FS2-19", "CTOR-11")
@ranks(2)
def test_a_unit_that_ran_alone_and_is_unsharded_by_hand_is_not_all_gathered_again_by_a_larger_root() -> None:
    model: Any = seeded()
    expected = copy.deepcopy(model)(batch())
    fully_shard(model.blocks[0])
    iterate(model.blocks[0])
    model.blocks[0].unshard()
    fully_shard(model)
    with trace.record() as recorder, torch.no_grad():
        found = model(batch())
    assert [event.unit for event in recorder.events if event.kind == "AG"] == [""]
    assert torch.equal(found, expected)
