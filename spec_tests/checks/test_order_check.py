"""How often the ranks compare their collectives, and what they say about optimizer steps on some ranks only."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import device, ranks
from spec_tests.models.modules import chain
from spec_tests.models.small import draw
from spec_tests.subject import FullyShardedDataParallel as FSDP


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
