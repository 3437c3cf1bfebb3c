"""Two equal models, such as an actor and a critic, that each rank loads in its own order, and weights from rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import flat_or_original, make, train, trained, wrapped
from spec_tests.harness import ranks
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP


@flat_or_original
@pytest.mark.spec("PROG-93")
@ranks(2)
def test_each_rank_loads_its_own_full_dicts_in_any_order(keep: bool) -> None:
    both = [trained(seed=seed, use_orig_params=keep) for seed in (0, 1)]
    saved = [(model.state_dict(), FSDP.optim_state_dict(model, optimizer)) for model, optimizer in both]
    before = [full_values(model) for model, _ in both]
    for number in (0, 1) if dist.get_rank() else (1, 0):
        (model, optimizer), (weights, states) = both[number], saved[number]
        model.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    for (model, optimizer), expected in zip(both, before, strict=True):
        assert_same(full_values(model), expected, bitwise=True)
        train(model, optimizer, [2])


@flat_or_original
@pytest.mark.spec("PROG-92")
@ranks(2)
def test_weights_of_rank_0_are_loaded_on_all_ranks_or_refused(keep: bool) -> None:
    options: Any = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, weights = wrapped(make(1), use_orig_params=keep), make().state_dict()
    mine = dict(weights) if dist.get_rank() == 0 else {}
    assert subject.set_model_state_dict(model, mine, options=options) == ([], [])
    assert_same(full_values(model), dict(make().named_parameters()), bitwise=True)
    if dist.get_rank() == 0:
        del mine["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        subject.set_model_state_dict(model, mine, options=options)
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        subject.set_model_state_dict(model, weights, options=StateDictOptions(broadcast_from_rank0=True))
