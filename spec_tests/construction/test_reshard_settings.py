"""Methods of `FSDPModule` that change when a unit is resharded and unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import ranks
from spec_tests.models.gradients import mean_gradients_of
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of, of_unit, recorded_iteration
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_gradients
from spec_tests.prefetch.test_counts import WHOLE
from spec_tests.subject import fully_shard, trace


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_reshard_after_forward_is_switchable() -> None:
    model = sharded()
    for choice in (True, False, True):
        model.set_reshard_after_forward(choice)
        assert recorded_iteration(model) == WHOLE[choice]
    model.blocks[2].set_reshard_after_forward(False)
    with trace.record() as recorder:
        loss_of(model(batch()))
    assert "FREE" not in of_unit(recorder, "blocks.2")
    assert "FREE" in of_unit(recorder, "blocks.1")


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
    freed = [word for word in recorded_iteration(model).split() if word.startswith("FREE")]
    assert [freed.count(f"FREE{index}") for index in range(4)] == [2, 2, 2, 2]
    assert freed.count("FREER") == 1


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_kept_params_need_no_all_gather_in_next_forward() -> None:
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for num_gathers in (5, 0, 0):
        with trace.record() as recorder:
            iterate(model)
        assert (recorder.count("AG"), recorder.count("FREE"), recorder.count("RS")) == (num_gathers, 0, 5)
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert recorder.order("AG", "FREE") == [], "an evaluation does not free them"
    model.set_reshard_after_backward(True)
    iterate(model)
    assert {type(p.data) for p in model.parameters()} == {DTensor}


@pytest.mark.spec("NEW-11")
@pytest.mark.parametrize("unneeded", ["embedding", "root"])
@ranks(2)
def test_group_unneeded_in_backward_is_not_all_gathered_there(unneeded: str) -> None:
    """The setting does not change inner modules: the linear layer is needed in both cases."""

    def tokens(x: Tensor) -> Tensor:
        return (x[:, :3].abs() * 10).long() % 11

    model, plain = (seeded(lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))) for _ in range(2))
    for module in (model[1], model) if unneeded == "root" else (model[0], model[1], model):
        fully_shard(module, reshard_after_forward=True)
    (model if unneeded == "root" else model[0]).set_unshard_in_backward(False)
    with trace.record() as recorder:
        loss_of(model(tokens(batch()))).backward()
    assert of_unit(recorder, "" if unneeded == "root" else "0", "AG", "RS") == ["AG", "RS"]
    assert of_unit(recorder, "1", "AG", "RS") == ["AG", "AG", "RS"]
    expected = mean_gradients_of(lambda net, x: loss_of(net(tokens(x))), plain)
    assert_same(full_gradients(model), expected)
