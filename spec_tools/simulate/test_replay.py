"""Times of operators, collectives and whole tapes, computed manually."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minifsdp_tools.simulate import tape
from minifsdp_tools.simulate.machine import CARDS, Card, Network, measured_costs
from minifsdp_tools.simulate.models import transformer
from minifsdp_tools.simulate.recording import Recording
from minifsdp_tools.simulate.replay import Result, replay
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES
from minifsdp_tools.simulate.tape import Collective, Kernel
from spec_tests.subject import trace
from spec_tools.simulate.small import SMALL

# A rate of 1 for everything, so that operations, bytes and seconds are the same numbers.
PLAIN: dict[str, Any] = {"matmul": 1.0, "matmul32": 1.0, "bandwidth": 1.0, "memory": 1e9, "efficiency": 1.0}
PLAIN |= {"bandwidth_efficiency": 1.0, "kernel": 0.0, "host_operator": 0.0, "host_collective": 0.0, "host_event": 0.0}
NETWORK = Network(8, within=1.0, between=1.0, latency_within=0.0, latency_between=0.0, efficiency=1.0)
COMPUTE, GATHER, REDUCE = 0, 1, 2
EIGHT, PAIRS = tuple(range(8)), (0, 8)


def kernel(seconds: float, stream: int = COMPUTE, phase: str = "forward") -> Kernel:
    return Kernel(stream, "aten::mm", seconds, 0, torch.bfloat16, phase, seconds)


def collective(seconds: int, stream: int = GATHER, ranks: tuple[int, ...] = EIGHT) -> Collective:
    """A collective that takes this time, whose group has ranks in one machine, or one in each of two machines."""
    num_bytes = seconds * 8 // 7 if ranks == EIGHT else seconds * 2 // 8
    return Collective(stream, "AG", ranks, num_bytes)


def run(*items: tape.Item, **options: Any) -> Result:
    stored = options.pop("stored", 0)
    events = options.pop("events", [])
    setup = Setup(SMALL, num_ranks=16)
    recording = Recording(setup, tape.Tape(list(items)), events, stored, 100)
    return replay(recording, Card("plain", **{**PLAIN, **options}), NETWORK)


# ---- operators and collectives --------------------------------------------------------------------------------------


@pytest.mark.spec("SIMULATE-06")
def test_operator_takes_the_longer_of_compute_and_memory() -> None:
    card = Card("a", 100.0, 10.0, 50.0, 1e9, efficiency=0.5, bandwidth_efficiency=0.8, kernel=0.25)
    mm = "aten::mm"
    assert card.seconds(Kernel(0, mm, 1000, 40, torch.bfloat16, "forward", 0)) == 0.25 + 1000 / 50
    assert card.seconds(Kernel(0, mm, 1000, 40, torch.float32, "forward", 0)) == 0.25 + 1000 / 5
    assert card.seconds(Kernel(0, mm, 1000, 4000, torch.bfloat16, "forward", 0)) == 0.25 + 4000 / 40


@pytest.mark.spec("SIMULATE-07")
def test_collective_takes_the_time_of_the_slower_link() -> None:
    network = Network(8, within=200e9, between=100e9, latency_within=0.0, latency_between=0.0, efficiency=1.0)
    sixteen = tuple(range(16))
    # The example of machine.py.
    assert network.seconds(Collective(0, "AG", sixteen, 800_000_000)) == pytest.approx(4e-3)
    # Within a machine, 7/8 of the bytes at the rate of its links.
    assert network.seconds(Collective(0, "AG", EIGHT, 800_000_000)) == pytest.approx(3.5e-3)
    # One rank in each machine: each of 8 such groups has an eighth of the network card.
    assert network.seconds(Collective(0, "RS", PAIRS, 100_000_000)) == pytest.approx(4e-3)
    assert network.seconds(Collective(0, "AR", PAIRS, 100_000_000)) == pytest.approx(8e-3)
    assert network.seconds(Collective(0, "AG", (0,), 100)) == 0


@pytest.mark.spec("SIMULATE-07")
def test_latency_counts_each_step_of_the_ring() -> None:
    network = Network(8, within=1e30, between=1e30, latency_within=1.0, latency_between=10.0)
    assert network.seconds(Collective(0, "AG", EIGHT, 8)) == pytest.approx(7)
    # 14 steps within machines and 2 between them.
    assert network.seconds(Collective(0, "AG", tuple(range(16)), 16)) == pytest.approx(14 + 2 * 10)


@pytest.mark.spec("SIMULATE-07")
def test_measured_collectives_replace_the_formula(tmp_path: Path) -> None:
    file = tmp_path / "h100-costs.json"
    measured = [{"collective": "all-gather", "ranks": 8, "latency": 2.0, "rate": 4.0, "error": 0.1, "rows": []}]
    file.write_text(json.dumps({"format": 1, "cards": ["H100"], "shared": False, "collectives": measured}))
    network = Network(costs=measured_costs(file))
    assert network.seconds(Collective(0, "AG", EIGHT, 8)) == 2 + 8 / 4
    assert network.seconds(Collective(0, "RS", EIGHT, 8)) == Network().seconds(Collective(0, "RS", EIGHT, 8))
    file.write_text(json.dumps({"format": 1, "shared": True, "collectives": measured}))
    with pytest.raises(ValueError, match=r"shared a device, so its times have no meaning\. Measure again"):
        measured_costs(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a file of measured collectives\. python -m spec_tools\.gpu writes"):
        measured_costs(file)


# ---- tapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SIMULATE-08")
def test_stream_runs_its_work_in_order_and_waits_for_events() -> None:
    # The example of replay.py, in seconds instead of milliseconds.
    items = [collective(7), tape.RecordEvent(GATHER, 1), kernel(2), tape.WaitEvent(COMPUTE, 1), kernel(2)]
    assert run(*items).seconds == 7 + 2
    # Without the wait, both streams run at the same time.
    assert run(*items[:3], items[4]).seconds == 7
    # The event is recorded before the second all-gather, so the compute stream does not wait for that one.
    assert run(*items[:2], collective(7), *items[2:]).seconds == 14
    early = run(*items[:2], collective(7), *items[2:])
    assert early.compute_seconds == 4


@pytest.mark.spec("SIMULATE-08")
def test_work_starts_after_the_cpu_has_issued_it() -> None:
    assert run(kernel(1), kernel(1), host_operator=5.0).seconds == 5 + 5 + 1
    assert run(kernel(10), kernel(1), host_operator=5.0).seconds == 5 + 10 + 1


@pytest.mark.spec("SIMULATE-08")
def test_cpu_waits_for_an_event_only_until_it_is_complete() -> None:
    result = run(kernel(10), tape.RecordEvent(COMPUTE, 1), tape.HostWait(1), kernel(3, GATHER), host_operator=1.0)
    # The kernel runs from 1 to 11, the other one is issued from 11 to 12.
    assert (result.seconds, result.waits, result.host_seconds) == (15, 10, 2)
    # An event of an earlier step is complete.
    assert run(tape.HostWait(99), tape.WaitEvent(COMPUTE, 98), kernel(3)).seconds == 3


@pytest.mark.spec("SIMULATE-08")
def test_events_of_the_engine_have_the_times_of_their_streams() -> None:
    # The times of a recorded event are positions on the tape.
    events = [trace.Event("AG", "0", 0.0, 0.0), trace.Event("F", "0", 3.0, 4.0)]
    items = [collective(7), tape.RecordEvent(GATHER, 1), tape.WaitEvent(COMPUTE, 1), kernel(2)]
    result = run(*items, events=events)
    assert [(event.kind, event.start, event.end) for event in result.events] == [("AG", 0, 7), ("F", 7, 9)]


@pytest.mark.spec("SIMULATE-09")
def test_exposed_communication_is_the_time_without_computation() -> None:
    items = [kernel(2), collective(7), tape.RecordEvent(GATHER, 1), tape.WaitEvent(COMPUTE, 1), kernel(3)]
    result = run(*items)
    assert (result.seconds, result.compute_seconds, result.exposed_seconds) == (10, 5, 5)
    assert result.tokens_per_second == 10
    # Two collectives at once are counted once.
    both = run(kernel(2), collective(7), collective(8, REDUCE, PAIRS))
    assert both.exposed_seconds == 6


@pytest.mark.spec("SIMULATE-09")
def test_utilization_counts_recomputation_in_hfu_only() -> None:
    result = run(kernel(2), kernel(6, phase="backward"))
    # Forward and twice as much are useful, the rest of backward is recomputation.
    assert (result.mfu, result.hfu) == (3 * 2 / 8, 1)


@pytest.mark.spec("SIMULATE-10")
def test_collectives_of_one_group_wait_for_each_other() -> None:
    assert run(collective(7), collective(7, REDUCE)).seconds == 14
    assert run(collective(7), collective(8, REDUCE, PAIRS)).seconds == 8


@pytest.mark.spec("SIMULATE-09")
def test_slowdown_lengthens_computation_next_to_a_collective() -> None:
    items = [collective(7), kernel(10)]
    assert run(*items).seconds == 10
    assert run(*items, slowdown=0.5).seconds == 10 + 0.5 * 7


@pytest.mark.spec("SIMULATE-10")
def test_collectives_of_a_cpu_do_not_overlap() -> None:
    assert run(collective(7), collective(8, REDUCE, PAIRS), is_cpu=True).seconds == 15


@pytest.mark.spec("SIMULATE-09")
def test_a_cpu_delays_the_collective_and_the_computation_next_to_it() -> None:
    # The kernel takes 15 seconds. A card has completed the all-gather before, and a CPU needs 4 more seconds for it.
    items = [collective(14), kernel(10)]
    assert run(*items, slowdown=0.5).seconds == 15
    result = run(*items, slowdown=0.5, is_cpu=True)
    assert (result.seconds, result.compute_seconds, result.exposed_seconds) == (19, 15, 4)
    # If the collective ends first, the kernel is late in both cases.
    assert run(collective(7), kernel(10), slowdown=0.5, is_cpu=True).seconds == 10 + 0.5 * 7


@pytest.mark.spec("SIMULATE-11")
def test_held_memory_contains_blocks_that_another_stream_uses() -> None:
    items = [
        tape.Allocate(1, 100),
        tape.UseOn(1, COMPUTE),
        kernel(5),
        tape.Free(1, 100),
        # The CPU is ahead of the kernel, so the first block is still in use.
        tape.Allocate(2, 100),
        tape.Free(2, 100),
    ]
    result = run(*items, stored=40)
    assert (result.peak_allocated, result.peak_held, result.stored_bytes) == (140, 240, 40)
    # After a wait of the CPU, the memory can be used again.
    waits = [*items[:4], tape.RecordEvent(COMPUTE, 1), tape.HostWait(1), *items[4:]]
    assert run(*waits, stored=40).peak_held == 140
    # Without `record_stream`, the memory returns to its stream at once.
    assert run(items[0], *items[2:], stored=40).peak_held == 140
    # A block that existed at the beginning can be released.
    assert run(tape.Free(7, 40), kernel(1), *items[:1], stored=40).peak_held == 100


# --- the figures of cards and models, compared with a second source ---


# Multiprocessors, and for each of them and clock: operations of tensor cores and in float32. Then the clocks of both in
# GHz, the pins of the memory, the gigabits of a pin in a second, and the stacks of memory with their gigabytes.
BUILT = {
    "A100-40": (108, 2048, 128, 1.41, 1.41, 5120, 2.43, 5 * 8),
    "A100-80": (108, 2048, 128, 1.41, 1.41, 5120, 3.186, 5 * 16),
    "H100": (132, 4096, 256, 1.83, 1.98, 5120, 5.234, 5 * 16),
    "H200": (132, 4096, 256, 1.83, 1.98, 6144, 6.25, 6 * 23.5),
}


@pytest.mark.spec("SIMULATE-06")
@pytest.mark.parametrize("name", CARDS)
def test_rates_of_a_card_follow_from_its_construction(name: str) -> None:
    units, tensor, single, tensor_clock, clock, pins, gigabits, gigabytes = BUILT[name]
    card = CARDS[name]
    # Data sheets round to three digits.
    assert card.matmul == pytest.approx(units * tensor * tensor_clock * 1e9, rel=0.005)
    assert card.matmul32 == pytest.approx(units * single * clock * 1e9, rel=0.005)
    assert card.bandwidth == pytest.approx(pins * gigabits * 1e9 / 8, rel=0.005)
    assert card.memory == gigabytes * 1e9


# From the papers of the models: the parameters in millions, and the width of an attention head.
PAPERS = {
    "gpt2": (124.4, 64), "gpt2-medium": (354.8, 64), "gpt2-large": (774.0, 64), "gpt2-xl": (1557.6, 64),
    "gpt3-175b": (175_000, 128), "llama3-8b": (8030, 128), "llama3-70b": (70_554, 128),
    "mpt-125m": (125, 64), "mpt-350m": (356, 64), "mpt-760m": (760, 128), "mpt-1b": (1316, 128), "mpt-3b": (2652, 128),
    "mpt-7b": (6659, 128), "mpt-13b": (12_854, 128), "mpt-30b": (29_975, 128), "mpt-70b": (64_862, 128),
    "t5-11b": (11_307, 128),
}  # fmt: skip


@pytest.mark.spec("SIMULATE-04")
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_has_the_parameters_and_the_heads_of_its_paper(name: str) -> None:
    shape, (millions, head_width) = SHAPES[name], PAPERS[name]
    module = transformer(shape, 1, None, "none", 1).module
    assert sum(parameter.numel() for parameter in module.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)
    assert (shape.head_width or shape.width / shape.heads) == head_width
    assert shape.heads % (shape.kv_heads or shape.heads) == 0
    assert not shape.positions or shape.sequence <= shape.positions


@pytest.mark.spec("SIMULATE-04")
def test_llama_3_has_eight_heads_of_keys_and_a_context_of_8192_tokens() -> None:
    for name in ("llama3-8b", "llama3-70b"):
        assert (SHAPES[name].kv_heads, SHAPES[name].sequence) == (8, 8192)
