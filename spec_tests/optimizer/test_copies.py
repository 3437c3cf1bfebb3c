"""Copies of sharded models, optimizers that are created late, and weights that are read between iterations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, sharded, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import ShardingStrategy

PAIRS = [(strategy, orig) for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD) for orig in (False, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)


def check_refused(model: nn.Module) -> None:
    for whole in (model, nn.ModuleList([model])):
        with pytest.raises((RuntimeError, AssertionError), match=r"rank \d: .*torch\.save.*state_dict"):
            torch.save(whole, io.BytesIO())
        with pytest.raises((RuntimeError, AssertionError), match=r"rank \d: .*pickle.*state_dict"):
            pickle.dumps(whole)
        with pytest.raises((RuntimeError, AssertionError), match=r"rank \d: .*deepcopy.*state_dict"):
            copy.deepcopy(whole)


@pytest.mark.spec("PROG-03", "NEW-22")
@pairs
@ranks(2)
def test_pickle_of_wrapped_model_raises_with_remedy(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    check_refused(model)
    loss = loss_of(model(batch()))
    check_refused(model)
    loss.backward()
    check_refused(model)


@pytest.mark.spec("PROG-03", "NEW-22")
@ranks(2)
def test_pickle_of_fully_shard_model_raises_with_remedy() -> None:
    model = sharded()
    check_refused(model)
    iterate(model)
    check_refused(model)
    check_refused(model.blocks[0])


@pytest.mark.spec("NEW-22")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("runs_first", [False, True])
@ranks(2)
def test_shallow_copy_of_a_wrapper_trains_the_same_parameters(use_orig_params: bool, runs_first: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if runs_first:
        iterate(model)
        optimizer.zero_grad()
    duplicate = copy.copy(model)
    iterate(duplicate)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients
    optimizer.zero_grad()
    iterate(model)
    assert_same({name: dict(model.named_parameters())[name].grad for name in gradients}, gradients)
    optimizer.step()
    assert torch.equal(duplicate(batch()), model(batch()))


@pytest.mark.spec("PROG-04")
@ranks(2)
def test_layer_of_the_root_unit_can_be_copied() -> None:
    model = sharded()
    iterate(model)
    model.zero_grad()
    duplicate = copy.deepcopy(model.enter)
    before = full_values(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert not any(value.any() for value in full_values(duplicate).values())
    assert_same(full_values(model), before, bitwise=True)
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
    model = wrapped(sharding_strategy=SHARD_GRAD_OP, use_orig_params=True)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    plain = seeded()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = [loss_of(plain(batch(rank=rank))) for rank in range(2)]
    (sum(losses) / 2 + sum(parameter.square().sum() for parameter in plain.parameters())).backward()
    plain_optimizer.step()
    for name, value in full_values(model).items():
        torch.testing.assert_close(value, named(plain)[name])


@pytest.mark.spec("PROG-05")
@pairs
@ranks(2)
def test_optimizer_after_a_step_or_an_evaluation_trains(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    results = []
    for prepare in (lambda _: None, iterate, lambda model: torch.no_grad()(model)(batch())):
        model = wrapped(**options)
        prepare(model)
        model.zero_grad()
        optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
        optimizer.add_param_group({"params": list(model.parameters())[1:]})
        iterate(model, 0, optimizer)
        results.append(full_values(model))
    for other in results[1:]:
        assert_same(other, results[0], bitwise=True)


@pytest.mark.spec("PROG-07")
@pytest.mark.parametrize("blocks", [(), range(4)])
@ranks(2)
def test_ddp_around_fully_shard_raises_by_name(blocks: tuple[int, ...]) -> None:
    model = sharded(blocks=blocks)
    with pytest.raises(RuntimeError, match=r"rank \d: parameter '.*' is sharded.*DistributedDataParallel"):
        DistributedDataParallel(model)
    iterate(model)
