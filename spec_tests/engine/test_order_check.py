"""If ranks are about to all-gather different units, they raise an error before they receive each other's weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from spec_tests.engine.small import draw, shard_each, train_once
from spec_tests.harness import device, ranks
from spec_tests.models.modules import chain
from spec_tests.subject import FullyShardedDataParallel as FSDP


@pytest.mark.spec("NEW-19")
@ranks(2)
def test_each_unit_is_order_checked_once() -> None:
    model, ask = shard_each(chain()), collectives.ask
    issued: list[Any] = []
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "ask", lambda *args: (issued.append(args), ask(*args))[1])
        for _ in range(3):
            issued.clear()
            train_once(model)
            counts.append(len(issued))
    # Three units in the first iteration. The last check of each iteration compares the collectives of all ranks.
    assert counts == [3 + 1, 1, 1]


@pytest.mark.spec("HEALTHY-02", "ORDER-13")
@ranks(4)
def test_steps_of_another_model_on_some_ranks_cause_no_warning() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    dist.barrier()
    model = FSDP(chain(2), device_id=device())
    if rank >= 2:
        other = FSDP(chain(1), process_group=pairs[1], device_id=device())
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(draw(rank)).sum().backward()
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        # A warning is an error in tests.
        model(draw(rank)).sum().backward()
        optimizer.step()
    model.state_dict()


@pytest.mark.spec("ORDER-13")
@ranks(2)
def test_steps_on_one_rank_only_cause_one_warning() -> None:
    model = FSDP(chain(2), device_id=device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(draw(0)).sum().backward()
            if dist.get_rank() == 1:
                optimizer.step()
        model.state_dict()
    texts = [str(warning.message) for warning in caught]
    assert ["have stepped on ranks [1] only" in text for text in texts] == [True]
