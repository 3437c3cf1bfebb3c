"""A module that has two names in a model under ``fully_shard``, and the full state dict of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from spec_tests.harness import ranks
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.subject import fully_shard


def two_places() -> nn.Sequential:
    block = Block()
    return nn.Sequential(block, nn.Linear(6, 6), block)


@pytest.mark.spec("PROG-08")
@pytest.mark.parametrize("is_unit", [True, False])
@ranks(2)
def test_full_state_dict_of_module_in_two_places_loads(is_unit: bool) -> None:
    plain, model = seeded(two_places, 1), seeded(two_places, 2)
    if is_unit:
        fully_shard(model[0])
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True)
    assert list(get_model_state_dict(model, options=options)) == list(plain.state_dict())
    set_model_state_dict(model, plain.state_dict(), options=options)
    for name, value in get_model_state_dict(model, options=options).items():
        assert torch.equal(value, plain.state_dict()[name])
    assert torch.equal(model(batch()), plain(batch()))
    loss_of(model(batch())).backward()
    with pytest.raises(RuntimeError, match="whole tensors"):
        model.load_state_dict(plain.state_dict())
