"""Shards, gradients and optimizer states on the CPU."""

from __future__ import annotations

import pytest
import torch

from spec_tests.harness import device, ranks
from spec_tests.models.running import iterate
from spec_tests.models.sharding import grid_mesh, sharded
from spec_tests.subject import CPUOffloadPolicy, OffloadPolicy, trace

OFFLOADED = CPUOffloadPolicy(pin_memory=False)


@pytest.mark.spec("FS2-OFF-01")
@pytest.mark.pure
def test_offload_policies_are_separate_dataclasses() -> None:
    assert CPUOffloadPolicy().pin_memory is True
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
    assert CPUOffloadPolicy(pin_memory=False) == OFFLOADED
    assert not hasattr(OffloadPolicy(), "pin_memory")


@pytest.mark.spec("FS2-OFF-01", "MIG-07")
@ranks(2)
def test_offload_keeps_parameters_gradients_and_optimizer_state_on_the_cpu() -> None:
    model = sharded(offload_policy=OFFLOADED)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        iterate(model, step)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert {p.grad.device.type for p in model.parameters()} == {"cpu"}
        assert {p.grad.to_local().device.type for p in model.parameters()} == {"cpu"}
        optimizer.step()
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cpu"}


@pytest.mark.spec("FS2-OFF-01", "MIG-07")
@pytest.mark.parametrize("accumulate", [False, True])
@ranks(2)
def test_training_is_the_same_bit_by_bit(accumulate: bool) -> None:
    model, usual = sharded(offload_policy=OFFLOADED), sharded(offload_policy=OffloadPolicy())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, usual)]
    for step in range(4):
        assert iterate(model, step) == iterate(usual, step)
        if accumulate and step % 2 == 0:
            continue
        for mine, other in zip(model.parameters(), usual.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local().cpu(), other.grad.to_local().cpu())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), usual.parameters(), strict=True):
        assert torch.equal(mine.to_local().cpu(), other.to_local().cpu())


@pytest.mark.spec("FS2-OFF-01", "MIG-07")
@ranks(2)
def test_none_and_the_plain_policy_offload_nothing() -> None:
    for policy in (OffloadPolicy(), None):
        model = sharded(offload_policy=policy)
        with trace.record() as recorder:
            iterate(model)
        assert recorder.count("H2D") == recorder.count("D2H") == 0
        assert {p.device.type for p in model.parameters()} == {device().type}


@pytest.mark.spec("FS2-OFF-01")
@ranks(2)
def test_offload_records_copies_around_collectives() -> None:
    model = sharded(offload_policy=OFFLOADED)
    with trace.record() as recorder:
        iterate(model)
    assert recorder.count("H2D") == recorder.count("AG") == 9
    assert recorder.count("D2H") == recorder.count("RS") == 5
    of_one = [event.kind for event in recorder.events if event.unit == "blocks.1"]
    assert of_one == ["H2D", "AG", "F", "FREE", "H2D", "AG", "B", "FREE", "RS", "D2H"]


@pytest.mark.spec("FS2-OFF-01", "FS2-19")
@ranks(2)
def test_manually_unsharded_params_are_on_compute_device() -> None:
    model = sharded(offload_policy=OFFLOADED)
    model.unshard()
    assert model.enter.weight.device.type == device().type
    model.reshard()
    assert model.enter.weight.device.type == "cpu"


@pytest.mark.spec("FS2-OFF-01")
@pytest.mark.accelerator
@ranks(2)
def test_pinned_memory_is_the_default_and_can_be_left_out() -> None:
    for policy, pinned in ((CPUOffloadPolicy(), True), (OFFLOADED, False)):
        model = sharded(offload_policy=policy)
        assert {p.to_local().is_pinned() for p in model.parameters()} == {pinned}
        iterate(model)
        assert {p.grad.device.type for p in model.parameters()} == {"cpu"}


# torch's clipping reduces the norms of DTensors on the CPU, and a process group for GPUs only has no backend for that.
@pytest.mark.cpu
@pytest.mark.spec("FS2-OFF-01", "FS2-SYNC-01", "FS2-OPT-03", "FS2-18")
@ranks(4)
def test_offload_works_with_replicas_accumulation_and_clipping() -> None:
    mesh = grid_mesh()
    model, usual = sharded(offload_policy=OFFLOADED, mesh=mesh), sharded(mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, usual)]
    for step in range(4):
        for each in (model, usual):
            each.set_requires_gradient_sync(step % 2 == 1)
        assert iterate(model, step) == iterate(usual, step)
        if step % 2 == 1:
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, usual)]
            assert norms[0].full_tensor().item() == norms[1].full_tensor().item()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
