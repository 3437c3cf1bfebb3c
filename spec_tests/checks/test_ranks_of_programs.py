"""Ranks that all-gather in different orders or begin with different weights, and copies of a sharded model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models.apis import Api, all_apis, both_apis
from spec_tests.models.modules import seeded
from spec_tests.models.running import Wire, batch, detailed_debugging, iterate
from spec_tests.models.values import assert_same, full_values, mean_gradients, named


@pytest.mark.spec("NEW-19")
@pytest.mark.parametrize("num_before", [0, 1])
@both_apis
@ranks(2)
def test_different_order_raises_with_names_while_debugging(api: Api, num_before: int) -> None:
    """Torch's FSDP1 compares the first iteration, torch's FSDP2 none."""
    rank = dist.get_rank()
    with detailed_debugging():
        model = api.shard()
        for _ in range(num_before):
            iterate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        text = r"rank 0: all-gather of 'blocks.1'.*rank 1: all-gather of 'blocks.2'"
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}: .*{text}"):
            # On an accelerator, the answer is read at the end of the next backward.
            for _ in range(2):
                model(batch(), order=((0, 1, 2, 3), (0, 2, 1, 3))[rank]).sum().backward()
        # The failed iteration leaves no state behind.
        optimizer.zero_grad()
        iterate(model)
    assert_same(api.gradients(model), mean_gradients(seeded()))


@pytest.mark.spec("NEW-22")
@all_apis
@ranks(2)
def test_copy_of_a_sharded_model_raises_with_remedy(api: Api) -> None:
    model = api.shard()
    for module in (model, model.blocks[0], nn.ModuleList([model])):
        with Wire() as wire, pytest.raises((AssertionError, RuntimeError, TypeError)) as caught:
            copy.deepcopy(module)
        for part in ("deepcopy", "Copy the plain model before", "state_dict()"):
            assert part in str(caught.value)
        assert wire.sent == []
    assert_same(full_values(model), named(seeded()))
    iterate(model)
