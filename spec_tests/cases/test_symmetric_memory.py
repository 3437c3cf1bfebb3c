"""``set_symm_mem_for_comm``: the collectives of a unit use PyTorch's pool of symmetric memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
from spec_tests.harness import device, ranks


def model_of_two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(device())


@pytest.mark.spec("NEW-33")
@pytest.mark.simulated
@ranks(2)
def test_collectives_of_one_unit_use_the_pool_and_exchange_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = model_of_two_layers(), model_of_two_layers()
    minifsdp.fully_shard(model[0])
    minifsdp.fully_shard(model)
    backends = []
    pools = []
    exchanged = []

    @contextlib.contextmanager
    def use_mem_pool(pool: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(symm_mem, "set_backend", backends.append)
    monkeypatch.setattr(symm_mem, "get_mem_pool", lambda device: f"pool of {device.type}")
    monkeypatch.setattr(symm_mem, "rendezvous", lambda tensor, group: exchanged.append((tensor.numel(), group)))
    monkeypatch.setattr(torch.get_device_module(device()), "use_mem_pool", use_mem_pool, raising=False)
    model[0].set_symm_mem_for_comm()
    inputs = torch.linspace(-1, 1, 24, device=device()).view(4, 6)
    model(inputs).square().mean().backward()
    plain(inputs).square().mean().backward()

    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    assert backends == ["NCCL"] * 2  # the group of the parameters and the group of the gradients
    assert {*pools} == {f"pool of {device().type}"}
    # A weight (5, 6) and a bias (5): padded to 6 rows, 42 elements, and 21 on each rank. Gathered in forward and in
    # backward, then reduced. The outer unit does not use symmetric memory.
    assert [size for size, _ in exchanged] == [42, 42, 42, 21]
    assert {group for _, group in exchanged} == {dist.group.WORLD.group_name}


@pytest.mark.spec("NEW-33")
@pytest.mark.cpu
@ranks(2)
def test_on_cpus_the_call_raises_an_error_like_torch_and_the_model_trains() -> None:
    model, theirs = model_of_two_layers(), model_of_two_layers()
    minifsdp.fully_shard(model)
    torch_fsdp.fully_shard(theirs)
    if hasattr(theirs, "set_symm_mem_for_comm") and not torch.version.cuda:
        with pytest.raises(RuntimeError, match="backend NCCL"):
            theirs.set_symm_mem_for_comm()
    with pytest.raises(RuntimeError, match=r"rank \d: set_symm_mem_for_comm needs parameters on GPUs"):
        model.set_symm_mem_for_comm()
    inputs = torch.ones(4, 6)
    assert torch.equal(model(inputs), model_of_two_layers()(inputs))
