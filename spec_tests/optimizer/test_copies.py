"""Copies of sharded models, optimizers that are created late, and weights that are read between iterations."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import ranks
from spec_tests.models import apis, running
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import Block, seeded
from spec_tests.models.values import assert_same

batch, iterate, loss_of = running.batch, running.iterate, running.loss_of

COPIES: dict[str, Callable[[Any], Any]] = {
    r"torch\.save": lambda model: torch.save(model, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.spec("PROG-03", "NEW-22")
@pytest.mark.parametrize("name", COPIES)
@apis.every_setting
@ranks(2)
def test_a_copy_of_a_sharded_model_raises_with_remedy(api: apis.Api, strategy: Any, name: str) -> None:
    model = api.shard(strategy=strategy)

    def check() -> None:
        for one in (model, nn.ModuleList([model]), model.blocks[0]):
            with pytest.raises((RuntimeError, AssertionError), match=rf"rank \d: .*{name}.*state_dict"):
                COPIES[name](one)

    check()
    loss = loss_of(model(batch()))
    check()
    loss.backward()
    check()


@pytest.mark.spec("NEW-22")
@pytest.mark.parametrize("runs_first", [False, True])
@apis.wrapper_apis
@ranks(2)
def test_shallow_copy_of_a_wrapper_trains_the_same_parameters(api: apis.Api, runs_first: bool) -> None:
    model = api.shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if runs_first:
        iterate(model)
        optimizer.zero_grad()
    duplicate = copy.copy(model)
    iterate(duplicate)
    gradients = api.gradients(model)
    optimizer.zero_grad()
    iterate(model)
    assert_same(api.gradients(model), gradients, bitwise=True)
    optimizer.step()
    assert torch.equal(duplicate(batch()), model(batch()))


@pytest.mark.spec("PROG-04")
@ranks(2)
def test_layer_of_the_root_unit_can_be_copied() -> None:
    model, plain = apis.FULLY_SHARD.shard(), seeded()
    duplicate = copy.deepcopy(model.enter)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    # Between forward and backward, the root's parameters are unsharded, and the copy is a plain layer.
    loss = loss_of(model(batch()))
    layer = copy.deepcopy(model.enter)
    assert torch.equal(layer(batch()), plain.enter(batch()))
    assert_same(layer.state_dict(), plain.enter.state_dict())
    loss.backward()
    assert not any(value.any() for value in apis.FULLY_SHARD.values(duplicate).values())
    model.zero_grad()
    assert_trains_like(model)


@pytest.mark.spec("PROG-05")
@pytest.mark.not_simulated("the package inspects plain tensors only")
@ranks(2)
def test_late_optimizer_takes_parameters_or_raises_by_name() -> None:
    model = apis.ORIGINALS.shard(strategy=apis.SHARD_GRAD_OP)
    early = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    loss = loss_of(model(batch()))
    for late in (
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda: early.add_param_group({"params": list(model.parameters())[1:]}),
        lambda: model.requires_grad_(False),
        lambda: [setattr(parameter, "requires_grad", False) for parameter in model.parameters()],
    ):
        with pytest.raises(RuntimeError, match=r"rank \d: a parameter of shape \(.*before the forward or after the"):
            late()
    loss.backward()
    model.zero_grad()

    def loss_with_penalty(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(each(x))
        return loss + sum(parameter.square().sum() for parameter in each.parameters())

    # The parameters can be read, and a penalty on them is trained.
    assert_trains_like(model, loss=loss_with_penalty, bitwise=False)


@pytest.mark.spec("PROG-05")
@pytest.mark.parametrize("before", ["step", "evaluation"])
@apis.wrapper_settings
@ranks(2)
def test_optimizer_after_a_step_or_an_evaluation_trains(api: apis.Api, strategy: Any, before: str) -> None:
    model, other = api.shard(strategy=strategy), api.shard(strategy=strategy)
    with torch.set_grad_enabled(before == "step"):
        output = model(batch())
    if before == "step":
        output.sum().backward()
    model.zero_grad()
    for each in (model, other):
        optimizer = torch.optim.SGD(list(each.parameters())[:1], lr=0.1)
        optimizer.add_param_group({"params": list(each.parameters())[1:]})
        iterate(each, 0, optimizer)
    assert_same(api.values(model), api.values(other), bitwise=True)
    assert not torch.equal(api.values(model)["enter.weight"], seeded().enter.weight)


@pytest.mark.spec("PROG-07")
@pytest.mark.parametrize("unit_classes", [(), (Block,)])
@ranks(2)
def test_ddp_around_fully_shard_raises_by_name(unit_classes: Any) -> None:
    model = apis.FULLY_SHARD.shard(unit_classes=unit_classes)
    with pytest.raises(RuntimeError, match=r"rank \d: parameter '.*' is sharded.*DistributedDataParallel"):
        DistributedDataParallel(model)
    assert_trains_like(model)
