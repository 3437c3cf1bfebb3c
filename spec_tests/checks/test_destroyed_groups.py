"""A process group that the program has destroyed is freed, although the log of its collectives was in use."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import ranks
from spec_tests.subject import FullyShardedDataParallel

pytestmark = [pytest.mark.cpu, pytest.mark.spec("HEALTHY-06")]


@ranks(2)
def test_nothing_keeps_a_group_that_was_destroyed() -> None:
    group = dist.new_group([0, 1])
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=group, device_id=torch.device("cpu"))
    model(torch.ones(1, 4)).sum().backward()
    seen = weakref.ref(group)

    dist.destroy_process_group(group)
    del model, group
    gc.collect()

    assert seen() is None
