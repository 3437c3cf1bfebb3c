"""After an exception in the middle of an iteration: the next iteration, and reading and writing of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor

from spec_tests.errors.faults import FAULTS, Fault, fail_in_forward
from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, WRAPPED, Api, all_apis, every_setting
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of, recorded_iteration
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full, full_gradients, full_values, mean_gradients
from spec_tests.subject import FullyShardedDataParallel, StateDictType, get_optimizer_state_dict

in_forward = pytest.mark.parametrize("fault", ["forward", "inside"])


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("fault", FAULTS)
@every_setting
@ranks(2)
def test_iterations_after_an_exception_have_the_usual_gradients_and_events(api: Api, strategy: Any, fault: str) -> None:
    model = api.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The first iteration records the orders.
    for num_before in range(2):
        FAULTS[fault](model)
        # Do not call `model.zero_grad()`: the model may have unsharded parameters, which the optimizer does not have.
        optimizer.zero_grad()
        iterate(model, num_before)
        assert_same(api.gradients(model), mean_gradients(seeded(), (num_before,)))
        optimizer.zero_grad()
    untouched = api.shard(strategy=strategy)
    iterate(untouched)
    assert recorded_iteration(model) == recorded_iteration(untouched)


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("impl", CheckpointImpl, ids=str)
@every_setting
@ranks(2)
def test_the_iteration_after_an_exception_in_a_recomputation_is_right(
    api: Api, strategy: Any, impl: CheckpointImpl
) -> None:
    def fail_in_recomputation(*_: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            raise Fault

    plain = seeded()
    hook = plain.blocks[1].linear.register_forward_hook(fail_in_recomputation)
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = checkpoint_wrapper(block, impl)
    model = api.shard(plain, unit_classes=(CheckpointWrapper,), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Fault):
        iterate(model)
    hook.remove()
    optimizer.zero_grad()
    iterate(model)
    assert_same(api.gradients(model), mean_gradients(seeded()))


@pytest.mark.spec("NEW-15", "SHARD-14")
@pytest.mark.parametrize("fault", ["inside", "backward"])
@every_setting
@ranks(2)
def test_an_evaluation_may_follow_an_exception_and_be_interrupted_by_one(api: Api, strategy: Any, fault: str) -> None:
    model, plain = api.shard(strategy=strategy), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    FAULTS[fault](model)
    with torch.no_grad():
        assert torch.equal(model(batch(4)), plain(batch(4)))
        FAULTS["inside"](model)
    optimizer.zero_grad()
    iterate(model)
    assert_same(api.gradients(model), mean_gradients(plain))


@pytest.mark.spec("NEW-15")
@ranks(2)
def test_interrupted_iteration_does_not_break_another_one_between_forward_and_backward() -> None:
    model = WRAPPED.shard()
    loss = loss_of(model(batch()))
    fail_in_forward(model)
    loss.backward()
    assert_same(WRAPPED.gradients(model), mean_gradients(seeded()))


# --- the state ---


def in_shards(api: Api, model: Any, _: Any) -> dict[str, Any]:
    """This rank's part of each entry of a sharded state dict."""
    if api == FULLY_SHARD:
        return {name: value.to_local() for name, value in model.state_dict().items()}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {name: value.local_tensor() for name, value in model.state_dict().items()}


def of_optimizer(api: Api, model: Any, optimizer: Any) -> dict[str, Any]:
    read = get_optimizer_state_dict if api == FULLY_SHARD else FullyShardedDataParallel.optim_state_dict
    states = read(model, optimizer)["state"]
    return {f"{name}.{key}": full(value) for name, state in states.items() for key, value in state.items()}


def loaded(api: Api, model: Any, _: Any) -> dict[str, Any]:
    """The values after loading zeros, and then the values of before."""
    saved = model.state_dict()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in saved.items()})
    assert not any(value.any() for value in full_values(model).values())
    model.load_state_dict(saved)
    return full_values(model)


READERS: dict[str, Callable[[Api, Any, Any], dict[str, Tensor]]] = {
    "full": lambda api, model, _: api.state_dict(model),
    "in shards": in_shards,
    "optimizer": of_optimizer,
    "loaded": loaded,
    "summoned": lambda api, model, _: full_values(model),
}


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("reader", READERS)
@all_apis
@ranks(2)
def test_state_is_read_and_loaded_correctly_after_an_exception(api: Api, reader: str) -> None:
    model, read = api.shard(), READERS[reader]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    iterate(model)
    optimizer.step()
    expected = {name: torch.clone(value) for name, value in read(api, model, optimizer).items()}
    for fail in FAULTS.values():
        fail(model)
        assert_same(read(api, model, optimizer), expected, bitwise=True)
    optimizer.zero_grad()
    with api.no_sync(model):
        iterate(model)
        fail_in_forward(model)
    assert_same(read(api, model, optimizer), expected, bitwise=True)


@pytest.mark.spec("NEW-15")
@pytest.mark.api_spec(wrapper=["NOSYNC-02"], fully_shard=["FS2-SYNC-01"])
@in_forward
@every_setting
@ranks(2)
def test_an_exception_keeps_unreduced_gradients(api: Api, strategy: Any, fault: str) -> None:
    """Defect: an error in the forward of a later micro-batch drops the gradient sum of the earlier ones."""
    model = api.shard(strategy=strategy)
    with api.no_sync(model):
        iterate(model, 7)
        FAULTS[fault](model)
    iterate(model, 1)
    assert_same(api.gradients(model), mean_gradients(seeded(), (7, 1)))


@pytest.mark.spec("NEW-15", "PREF-13")
@in_forward
@every_setting
@ranks(2)
def test_forward_after_an_exception_uses_newly_written_values(api: Api, strategy: Any, fault: str) -> None:
    """Defect: the next forward continues the one that raised and uses the parameters unsharded for it."""
    options = {} if api == FULLY_SHARD else {"forward_prefetch": True}
    model, plain = api.shard(strategy=strategy, **options), seeded()
    # The first iteration records the order of the prefetches.
    iterate(model)
    owned = list(model.parameters())
    FAULTS[fault](model)
    with torch.no_grad():
        for parameter in (*owned, *plain.parameters()):
            parameter.mul_(2)
        assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("NEW-15")
@in_forward
@ranks(2)
def test_submodule_called_after_an_exception_uses_current_values(fault: str) -> None:
    """Defect: no hook runs after an exception, and the part acts as if the interrupted forward were still running."""
    model, plain = sharded(reshard_after_forward=False), seeded()
    parameters = list(model.parameters())
    FAULTS[fault](model)
    with torch.no_grad():
        for parameter in (*parameters, *plain.parameters()):
            parameter.mul_(2)
    assert torch.equal(model.blocks[0](batch()), plain.blocks[0](batch()))


# --- `reset_iter_state` of `fully_shard` ---


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_reduced", [True, False])
@ranks(2)
def test_after_a_reset_the_next_iteration_is_correct(fault: str, is_reduced: bool) -> None:
    model, plain = sharded(), seeded()
    iterate(model)
    for step in (1, 2):
        model.set_requires_gradient_sync(is_reduced)
        iterate(model, 7)
        FAULTS[fault](model)
        model.set_requires_gradient_sync(True)
        model.reset_iter_state()
        assert {type(p.data) for p in model.parameters()} == {DTensor}
        model.zero_grad()
        iterate(model, step)
        assert_same(full_gradients(model), mean_gradients(plain, (step,)))


@pytest.mark.spec("NEW-15")
@ranks(2)
def test_only_the_root_may_reset_and_an_unneeded_reset_is_harmless() -> None:
    model = sharded()
    # The block is the root until the model is used.
    iterate(model.blocks[0])
    model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    iterate(model)
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()
    gradients = full_gradients(model)
    model.reset_iter_state()
    assert_same(full_gradients(model), gradients)
