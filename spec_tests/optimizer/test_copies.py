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
from spec_tests.models.apis import ORIGINALS, Api, every_setting, wrapper_apis, wrapper_settings
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import SHARD_GRAD_OP, sharded
from spec_tests.models.values import assert_same, full_values, named

COPIES: dict[str, Callable[[Any], Any]] = {
    r"torch\.save": lambda model: torch.save(model, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.spec("PROG-03", "NEW-22")
@pytest.mark.parametrize("name", COPIES)
@every_setting
@ranks(2)
def test_a_copy_of_a_sharded_model_raises_with_remedy(api: Api, strategy: Any, name: str) -> None:
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
@wrapper_apis
@ranks(2)
def test_shallow_copy_of_a_wrapper_trains_the_same_parameters(api: Api, runs_first: bool) -> None:
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
    model = sharded()
    duplicate = copy.deepcopy(model.enter)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert not any(value.any() for value in full_values(duplicate).values())
    assert_same(full_values(model), named(seeded()), bitwise=True)
    # Between forward and backward, the root's parameters are unsharded, and the copy is a plain layer.
    loss = loss_of(model(batch()))
    plain = copy.deepcopy(model.enter)
    assert torch.equal(plain(batch()), seeded().enter(batch()))
    plain.state_dict()
    loss.backward()
    assert torch.equal(model(batch()), sharded()(batch()))


@pytest.mark.spec("PROG-05")
@pytest.mark.not_simulated("the package inspects plain tensors only")
@ranks(2)
def test_late_optimizer_takes_parameters_or_raises_by_name() -> None:
    plain, model = seeded(), ORIGINALS.shard(strategy=SHARD_GRAD_OP)
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
    # The parameters can be read, and a penalty on them is trained.
    (loss + sum(parameter.square().sum() for parameter in model.parameters())).backward()
    loss = sum(loss_of(plain(batch(rank=rank))) for rank in range(2)) / 2
    (loss + sum(parameter.square().sum() for parameter in plain.parameters())).backward()
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(full_values(model), named(plain), bitwise=False)


@pytest.mark.spec("PROG-05")
@pytest.mark.parametrize("before", ["step", "evaluation"])
@wrapper_settings
@ranks(2)
def test_optimizer_after_a_step_or_an_evaluation_trains(api: Api, strategy: Any, before: str) -> None:
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
    assert_same(full_values(model), full_values(other), bitwise=True)
    assert not torch.equal(full_values(model)["enter.weight"], seeded().enter.weight)


@pytest.mark.spec("PROG-07")
@pytest.mark.parametrize("blocks", [(), range(4)])
@ranks(2)
def test_ddp_around_fully_shard_raises_by_name(blocks: tuple[int, ...]) -> None:
    model = sharded(blocks=blocks)
    with pytest.raises(RuntimeError, match=r"rank \d: parameter '.*' is sharded.*DistributedDataParallel"):
        DistributedDataParallel(model)
    iterate(model)
