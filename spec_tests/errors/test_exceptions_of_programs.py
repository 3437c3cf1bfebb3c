"""After an exception in the middle of an iteration: the next iteration, and reading and writing of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spec_tests.errors.faults import FAULTS, fail_with_unreduced_gradients
from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, Api, all_apis, every_setting
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, recorded_iteration
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full, full_gradients, full_values, mean_gradients
from spec_tests.prefetch.test_counts import WHOLE
from spec_tests.subject import FullyShardedDataParallel, StateDictType, get_optimizer_state_dict


@pytest.mark.spec("NEW-15")
@every_setting
@ranks(2)
def test_iteration_after_an_exception_is_correct(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterate(model)
    for step, fail in enumerate(FAULTS.values()):
        fail(model)
        # Do not call `model.zero_grad()`: the model may have unsharded parameters, which the optimizer does not have.
        optimizer.zero_grad()
        iterate(model, step)
        assert_same(api.gradients(model), mean_gradients(seeded(), (step,)))


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
    """The values after loading other ones, and then the values of a new model."""
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
    fail_with_unreduced_gradients(api, model)
    assert_same(read(api, model, optimizer), expected, bitwise=True)


@pytest.mark.spec("NEW-15")
@pytest.mark.api_spec(wrapper=["NOSYNC-02"], fully_shard=["FS2-SYNC-01"])
@every_setting
@ranks(2)
def test_an_exception_keeps_unreduced_gradients(api: Api, strategy: Any) -> None:
    """Defect: an error in the forward of a later micro-batch drops the gradient sum of the earlier ones."""
    for fault in ("forward", "inside"):
        model = api.shard(strategy=strategy)
        fail_with_unreduced_gradients(api, model, fault)
        iterate(model, 1)
        assert_same(api.gradients(model), mean_gradients(seeded(), (7, 1)))


@pytest.mark.spec("NEW-15")
@every_setting
@ranks(2)
def test_forward_after_an_exception_uses_newly_written_values(api: Api, strategy: Any) -> None:
    """Defect: the next forward continues the one that raised and uses the parameters unsharded for it."""
    for fault in ("forward", "inside"):
        model, plain = api.shard(strategy=strategy), seeded()
        owned = list(model.parameters())
        FAULTS[fault](model)
        with torch.no_grad():
            for parameter in (*owned, *plain.parameters()):
                parameter.mul_(2)
            assert torch.equal(model(batch()), plain(batch()))


# --- only fully_shard ---


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("fault", [*FAULTS, "unreduced"])
@ranks(2)
def test_after_a_reset_the_next_iteration_is_correct(fault: str) -> None:
    model, plain = sharded(), seeded()
    iterate(model)
    for step in (1, 2):
        if fault == "unreduced":
            fail_with_unreduced_gradients(FULLY_SHARD, model)
        else:
            FAULTS[fault](model)
        model.reset_iter_state()
        assert {type(p.data) for p in model.parameters()} == {DTensor}
        model.zero_grad()
        iterate(model, step)
        assert_same(full_gradients(model), mean_gradients(plain, (step,)))
    model.zero_grad()
    assert recorded_iteration(model) == WHOLE[None]


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("fault", ["forward", "inside"])
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
