"""A model on a device that is not the current device. Every collective uses the device of the model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from minifsdp import while_all_have_data
from spec_tests.harness import ranks
from spec_tests.harness.simulated.nccl import SimulatedNccl
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy


@pytest.mark.spec("STREAM-07")
@pytest.mark.simulated
@ranks(2)
def test_objects_are_sent_from_the_device_of_the_model() -> None:
    other = torch.device("sim", 1)
    used: set[int] = set()
    run = SimulatedNccl._run

    def noted(self: Any, name: str, writes: Any, reads: Any, *rest: Any) -> Any:
        used.update(tensor.get_device() for tensor in (*writes, *reads))
        return run(self, name, writes, reads, *rest)

    def current_device(group: Any = None) -> str:
        return f"sim:{torch.get_device_module('sim').current_device()}"

    # `tensor.to("cuda")` uses the current device, and `tensor.to("sim")` always the first.
    from_current = mock.patch.object(distributed_c10d, "_get_object_coll_device", current_device)
    with from_current, mock.patch.object(SimulatedNccl, "_run", noted):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            model = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=strategy, device_id=other)
            optimizer = torch.optim.Adam(model.parameters())
            for rows in while_all_have_data([torch.ones(2, 4, device=other)] * 2):
                with torch.no_grad():
                    model(rows)
                # Autograd supports only one simulated device, so there is no backward.
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            model.load_state_dict(model.state_dict())
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states)
    assert used == {1}
