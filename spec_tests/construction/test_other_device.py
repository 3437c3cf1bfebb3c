"""A model on a device that is not the current device. Every collective uses the device of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from minifsdp import while_all_have_data
from spec_tests import subject
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


@pytest.mark.spec("STREAM-07", "OSD-LOAD-05")
@pytest.mark.simulated
@ranks(2)
def test_optimizer_states_use_no_memory_of_the_device_of_another_rank() -> None:
    mine = torch.device("sim", dist.get_rank())
    ignored = nn.Linear(4, 4, device=mine)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4), ignored), ignored_modules=[ignored], device_id=mine, use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Some optimizers keep a list of tensors for each parameter, for example LBFGS.
    for state in optimizer.state.values():
        state["history"] = [torch.ones(1, device=mine)]
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert saved["state"]["0.bias"]["history"][0].tolist() == [1.0]
    assert set(devices_in(saved)) <= {"cpu", str(mine)}
    given = saved if dist.get_rank() == 0 else {}
    config = subject.FullOptimStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(
        model, subject.StateDictType.FULL_STATE_DICT, subject.FullStateDictConfig(rank0_only=True), config
    ):
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, given)
    assert set(devices_in(loaded)) <= {"cpu", str(mine)}
    optimizer.load_state_dict(loaded)
    assert set(devices_in(optimizer.state_dict())) == {str(mine)}


def devices_in(value: Any) -> Iterator[str]:
    return (str(leaf.device) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
