"""A process group with two backends: collectives of an accelerator's tensors compare no sizes between CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.checks.collective_log import log
from minifsdp.engine.exchange import call
from minifsdp.engine.mesh import Group
from spec_tests.harness import ranks
from spec_tests.subject import FullyShardedDataParallel


@pytest.mark.spec("STREAM-19")
@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["cpu", "meta"])
@ranks(2)
def test_only_cpu_tensors_are_compared_between_cpus_before_they_are_sent(kind: str) -> None:
    # The checks begin with the first sharded model.
    FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    group: Any = Group.of(dist.new_group())
    checked: list[int] = []
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor, group: Any) -> None:
        sent.append(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.sequence_of(group).transport, "check_size", lambda _, epoch: checked.append(epoch))
        # A tensor of another device stands for one of an accelerator.
        call(send, group, torch.zeros(1, device=kind))
    assert len(sent) == 1
    assert len(checked) == (1 if kind == "cpu" else 0)
