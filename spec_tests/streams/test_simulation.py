"""Tests of the simulated device: small programs with known races.

Nearly every program runs twice, with and without the one wait that it needs. A checker that always reports a race, or
never does, fails half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.harness import device, rank_among_fake_ranks, simulated
from spec_tests.streams.simulation import WORLD, add_on_new_stream, kinds, module, with_and_without_the_wait, zeros

# ---- streams and events ----


@pytest.mark.spec("SIM-01", "SIM-03")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_read_on_other_stream_needs_event(waits: bool) -> None:
    x = zeros(8)
    side = add_on_new_stream(x)
    if waits:
        module().current_stream().wait_event(side.record_event())
    x.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_early_event_does_not_cover_later_work() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    event = side.record_event()
    with module().stream(side):
        x.add_(1)
    event.wait()
    x.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_synchronize_orders_stream_before_cpu() -> None:
    x = zeros(8)
    side = add_on_new_stream(x)
    side.synchronize()
    x.sum()
    assert kinds() == []
    assert [reason for reason, _ in WORLD.stops] == ["stream.synchronize"]


@pytest.mark.spec("SIM-03")
@rank_among_fake_ranks(2)
def test_streams_may_touch_different_bytes_of_one_allocation() -> None:
    x = zeros(8)
    add_on_new_stream(x[:4])
    x[4:].sum()
    assert kinds() == []
    x[3:].sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-03")
@rank_among_fake_ranks(2)
def test_two_readers_do_not_collide() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.sum()
    x.sum()
    assert kinds() == []


@pytest.mark.spec("SIM-03")
@rank_among_fake_ranks(2)
def test_a_report_names_both_operators_both_streams_and_the_wait_that_is_missing() -> None:
    x, side = zeros(8), module().Stream()
    side.name = "gather stream"
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.add_(1)
    x.mul_(2)
    (race,) = WORLD.races.values()
    WORLD.races.clear()
    first, second, third = str(race).splitlines()
    assert first == "RACE: write of bytes 0 to 32 on the compute stream by mul_ [the user's program]"
    assert second == "  is not ordered after write of bytes 0 to 32 on the gather stream by add_ [the user's program]"
    assert third == "  missing: the compute stream has never waited for the gather stream"


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_backward_runs_on_a_thread_of_its_own_and_on_the_default_stream() -> None:
    x = zeros(4).requires_grad_()
    seen = []
    x.register_hook(lambda gradient: seen.append(module().current_stream()))
    (x * 2).sum().backward()
    assert seen == [module().default_stream()]
    assert torch.equal(x.grad.cpu(), torch.full((4,), 2.0))
    assert kinds() == []


# ---- memory ----


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("way", ["not at all", "record_stream", "waits", "keeps it"])
@rank_among_fake_ranks(2)
def test_memory_returns_to_its_stream_unless_recorded(way: str) -> None:
    side = module().Stream()
    with module().stream(side):
        x = zeros(1024)
    module().current_stream().wait_stream(side)
    x.sum()
    if way == "record_stream":
        x.record_stream(module().current_stream())
    kept = [x] if way == "keeps it" else []
    del x
    if way == "waits":
        side.wait_stream(module().current_stream())
    with module().stream(side):
        zeros(1024)
    assert kinds() == (["reuse"] if way == "not at all" else [])
    del kept


@pytest.mark.spec("SIM-02")
@rank_among_fake_ranks(2)
def test_access_to_resized_storage_is_reported() -> None:
    x = zeros(8)
    x.untyped_storage().resize_(0)
    assert module().memory_allocated() == 0
    x.untyped_storage().resize_(32)
    x.fill_(1)
    assert kinds() == []
    assert module().memory_allocated() == 32
    x.untyped_storage().resize_(0)
    WORLD.memory.access(x._home, simulated.Access(1, 1, 0, 4, False, "read", ""), {})
    assert kinds() == ["freed"]


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("recorded", [True, False], ids=["record_stream", "waits"])
@rank_among_fake_ranks(2)
def test_record_stream_delays_memory_reuse(recorded: bool) -> None:
    side = module().Stream()
    module().reset_peak_memory_stats()
    for _ in range(3):
        with module().stream(side):
            x = zeros(1024)
        module().current_stream().wait_stream(side)
        x.sum()
        if recorded:
            x.record_stream(module().current_stream())
        del x
        side.wait_stream(module().current_stream())
    assert module().max_memory_allocated() == 4096 * (3 if recorded else 1) + 4
    assert kinds() == []


@pytest.mark.spec("SIM-02")
@rank_among_fake_ranks(2)
def test_tensor_memory_counts_until_last_view_ends() -> None:
    x = zeros(1024)
    view = x[:10].view(2, 5)
    del x
    assert module().memory_allocated() == 4096
    del view
    assert module().memory_allocated() == 0


# ---- the host ----


@pytest.mark.spec("SIM-02")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_cpu_must_not_read_pinned_memory_before_its_copy_ends(waits: bool) -> None:
    here = torch.zeros(8).pin_memory()
    here.copy_(zeros(8), non_blocking=True)
    if waits:
        module().synchronize()
    here.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-02")
@rank_among_fake_ranks(2)
def test_non_blocking_copy_to_the_cpu_has_pinned_memory() -> None:
    here = zeros(8).to("cpu", non_blocking=True)
    assert here.is_pinned()
    assert not WORLD.stops
    here.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
@rank_among_fake_ranks(2)
def test_a_batch_in_pinned_memory_must_not_be_overwritten_while_it_is_copied(is_pinned: bool) -> None:
    batch = torch.ones(8).pin_memory() if is_pinned else torch.ones(8)
    batch.to(device(), non_blocking=True)
    batch.zero_()
    assert kinds() == (["race"] if is_pinned else [])


STOPS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "item": (lambda x: x.sum().item(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "equal": (lambda x: torch.equal(x, x), 1),
    "to the device": (lambda x: torch.ones(8).to(x.device), 1),
    "to the device, non-blocking": (lambda x: torch.ones(8).to(x.device, non_blocking=True), 0),
    "add": (lambda x: x + 1, 0),
}


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("what", STOPS)
@rank_among_fake_ranks(2)
def test_stops_of_the_cpu_are_counted(what: str) -> None:
    does, num_stops = STOPS[what]
    does(zeros(8))
    assert sum(WORLD.stops.values()) == num_stops


# ---- operations that the device refuses ----


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_the_device_does_not_compute_with_memory_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        zeros(3) + torch.zeros(3)
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        torch.zeros(3).add_(zeros(3))
    assert torch.equal((zeros(3) + torch.tensor(1.0)).cpu(), torch.ones(3)), "a single number needs no memory"
    zeros(3).copy_(torch.ones(3))


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_tensors_of_two_devices_do_not_mix_and_a_third_device_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        zeros(3) + torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.zeros(3, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        module().set_device(7)


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_a_strict_device_raises_where_the_cpu_reads_too_early() -> None:
    here = torch.zeros(8).pin_memory()
    with WORLD.strict():
        here.copy_(zeros(8), non_blocking=True)
        with pytest.raises(simulated.SimulatedRaceError, match="the CPU never waited"):
            here.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_a_strict_device_has_one_queue() -> None:
    x = zeros(8)
    with WORLD.strict():
        side = module().Stream()
        with module().stream(side):
            x.add_(1)
        x.sum()
    assert kinds() == []


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_the_current_stream_is_one_of_the_current_device_unless_a_device_is_named() -> None:
    module().set_device(1)
    assert module().current_stream().device == torch.device("sim", 1)
    assert module().current_stream(device()).device == device()
    x, side = zeros(8), module().Stream(device=device())
    with module().stream(side):
        x.add_(1)
    # A wait on the wrong stream: the current stream of another device.
    module().current_stream().wait_event(side.record_event())
    x.sum()
    assert "race" in kinds()
