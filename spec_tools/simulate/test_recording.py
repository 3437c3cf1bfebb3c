"""A recorded step, compared with a real step of ranks that communicate, and with the calculator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.events import events
from minifsdp.engine.hooks import IterationState
from minifsdp_tools.cost import Job, cost_of
from minifsdp_tools.simulate.machine import CARDS, Network
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import shape_of
from minifsdp_tools.simulate.tape import Collective, HostWait, Kernel, UseOn
from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, Api
from spec_tests.subject import ShardingStrategy, trace
from spec_tools.simulate.small import KINDS, SMALL, WIDTH, Pair, small, tower_module, tower_setup

ROOT = Path(__file__).parents[2]
SLOW = Network(ranks_per_machine=4, within=1e9, between=1e8)


def seconds(recording: Recording) -> float:
    return replay(recording, CARDS["H100"], SLOW).seconds


def sizes_of_reductions(recording: Recording) -> list[int]:
    return [item.num_bytes for item in recording.tape.items if isinstance(item, Collective) and item.kind == "RS"]


# ---- the engine's own order and waits -------------------------------------------------------------------------------


@pytest.fixture
def recorded(api: Api, strategy: str) -> list[str]:
    """The order of events in a recording, made by a process that has no process group."""
    setup = tower_setup("fsdp1" if api is ORIGINALS else "fsdp2", strategy, num_ranks=4)
    return [f"{event.kind} {event.unit}" for event in record(setup).events if event.kind in KINDS]


@pytest.mark.cpu
@pytest.mark.spec("SIMULATE-01")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@ranks(4)
def test_recorded_order_is_that_of_ranks_that_communicate(api: Api, strategy: str, recorded: list[str]) -> None:
    model = api.shard(tower_module(), unit_classes=(Pair,), strategy=ShardingStrategy[strategy])
    for _ in range(2):
        with trace.record() as recorder:
            model(torch.ones(1, WIDTH)).sum().backward()
        model.zero_grad()
    assert recorder.order(*KINDS) == recorded


@pytest.mark.spec("SIMULATE-02")
def test_step_without_prefetch_has_another_order_and_takes_longer() -> None:
    with_prefetch, without = small(api="fsdp1"), small(api="fsdp1", backward_prefetch=None)
    orders = [[f"{event.kind} {event.unit}" for event in one.events] for one in (with_prefetch, without)]
    assert orders[0] != orders[1]
    assert seconds(without) > seconds(with_prefetch)


@pytest.mark.spec("SIMULATE-02")
def test_wait_that_the_engine_adds_makes_the_step_longer() -> None:
    pre_backward, before = IterationState.pre_backward, small(api="fsdp2")

    def waits_for_everything(state: IterationState, unit: Any) -> None:
        pre_backward(state, unit)
        streams: CommStreams = unit.root.comm_streams
        # Makes the compute stream wait for the prefetched all-gather and for the reduction, too early.
        streams.all_gather.join()
        streams.reduce.join()

    with mock.patch.object(IterationState, "pre_backward", waits_for_everything):
        after = small(api="fsdp2")
    assert [event.kind for event in after.events] == [event.kind for event in before.events]
    assert seconds(after) > seconds(before)


@pytest.mark.spec("SIMULATE-02")
def test_limiter_of_the_wrapper_makes_the_cpu_wait() -> None:
    def waits(recording: Recording) -> int:
        return sum(isinstance(item, HostWait) for item in recording.tape.items)

    limited, free = small(api="fsdp1"), small(api="fsdp1", limit_all_gathers=False)
    assert waits(limited) > 0
    assert waits(free) == 0
    assert replay(limited, CARDS["H100"], SLOW).waits > 0
    # Without it, more units are in memory at once, because the CPU runs ahead of the network.
    assert replay(free, CARDS["H100"], SLOW).peak_held > replay(limited, CARDS["H100"], SLOW).peak_held
    assert any(isinstance(item, UseOn) for item in limited.tape.items)


# ---- contents of a recording ----------------------------------------------------------------------------------------


@pytest.mark.spec("SIMULATE-03")
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_matrix_products_and_collectives_have_their_sizes(api: str) -> None:
    recording = record(tower_setup(api, "FULL_SHARD", 8))
    products = [item for item in recording.tape.items if isinstance(item, Kernel) and item.flops]
    # A sample goes through 8 matrices; backward computes two products for each, except that of the input.
    assert [product.flops for product in products] == [2 * WIDTH * WIDTH] * (8 + 15)
    # The gradient of the sum is one number that is expanded.
    assert {product.num_bytes for product in products[:-1]} >= {4 * (2 * WIDTH + WIDTH * WIDTH)}
    assert {product.num_bytes for product in products} <= {4 * (n * WIDTH + 2 - n + WIDTH * WIDTH) for n in (1, 2)}
    collectives = [item for item in recording.tape.items if isinstance(item, Collective)]
    assert {item.num_bytes for item in collectives} == {2 * 4 * WIDTH * WIDTH}
    kinds = [item.kind for item in collectives]
    # Forward and backward of the last unit share one all-gather if the root has no parameters: see COST.
    assert (kinds.count("AG"), kinds.count("RS")) == (8, 4)


@pytest.mark.spec("SIMULATE-03")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_memory_is_that_of_the_calculator(api: str, strategy: str) -> None:
    recording = record(tower_setup(api, strategy, 8))
    matrix = (WIDTH, WIDTH)
    unit = 2 * 4 * WIDTH * WIDTH
    job = Job([[matrix, matrix]] * 4, strategy=strategy, num_shards=8, per_parameter=api == "fsdp2", optimizer=0)
    expected = cost_of(job)
    assert recording.stored_bytes == expected.stored
    # On an accelerator, also memory that communication streams still read: see IN_FLIGHT in test_cost.py.
    assert expected.peak <= recording.peak_bytes <= expected.peak + 3 * unit


@pytest.mark.spec("SIMULATE-03")
def test_state_of_the_optimizer_and_activations_are_counted() -> None:
    plain, adam = small(optimizer="sgd"), small(optimizer="adamw")
    of_shards = plain.stored_bytes
    assert adam.stored_bytes == 3 * of_shards
    longer = (small(micro_batch=64).peak_bytes - small(micro_batch=32).peak_bytes) / 32
    # At least 16 numbers of 2 bytes for each token, feature and block (arXiv 2205.05198).
    assert longer > 4 * 16 * 2 * WIDTH * SMALL.sequence


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SIMULATE-04")
def test_encoder_and_decoder_and_described_sizes_are_recorded() -> None:
    text = "layers=2,width=64,heads=4,vocabulary=100,intermediate=96,encoder=1,relative=8,rms=1,tied=1,kv_heads=2"
    recording = record(Setup(shape_of(text), 8, sequence=16))
    assert [event.unit for event in recording.events if event.kind == "F"][1:] == [
        "encoder.groups.0", "encoder.groups.1", "decoder.groups.0", "decoder.groups.1",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has no heads"):
        shape_of("layers=2,width=64")
    with pytest.raises(ValueError, match="is not a size of a model"):
        shape_of("layers=2,height=64")


@pytest.mark.spec("SIMULATE-03")
def test_causal_attention_takes_half_of_its_nominal_operations() -> None:
    kernels = [item for item in small().tape.items if isinstance(item, Kernel) and item.flops]
    attention = [item for item in kernels if "scaled_dot_product" in item.name]
    assert {item.flops / item.nominal_flops for item in attention} == {0.5}
    assert {item.flops / item.nominal_flops for item in kernels if item not in attention} == {1.0}


@pytest.mark.spec("SIMULATE-05")
def test_checkpointing_recomputes_and_saves_memory() -> None:
    recordings = [small(checkpointing=kind, micro_batch=8) for kind in ("none", "selective", "full")]
    kernels = [[item for item in one.tape.items if isinstance(item, Kernel)] for one in recordings]
    total = [sum(item.nominal_flops for item in items) for items in kernels]
    forward = [sum(item.nominal_flops for item in items if item.phase == "forward") for items in kernels]
    assert total[0] < total[1] < total[2] < total[0] + forward[0]
    assert forward[0] == forward[1] == forward[2]
    assert recordings[0].peak_bytes > recordings[1].peak_bytes > recordings[2].peak_bytes


@pytest.mark.spec("SIMULATE-05")
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_accumulation_without_synchronization_reduces_once(api: str) -> None:
    each, last = (small(api=api, accumulation=3, no_sync=no_sync) for no_sync in (False, True))
    assert len(sizes_of_reductions(each)) == 3 * len(sizes_of_reductions(last)) == 15
    assert each.tokens == last.tokens == 3 * SMALL.sequence


@pytest.mark.spec("SIMULATE-05")
def test_unit_of_several_blocks_has_fewer_and_larger_collectives() -> None:
    one, two = sizes_of_reductions(small(unit=1)), sizes_of_reductions(small(unit=2))
    assert (len(one), len(two)) == (5, 3)
    assert sum(one) == sum(two)


# ---- outside of training --------------------------------------------------------------------------------------------


@pytest.mark.spec("SIMULATE-12")
def test_two_recordings_are_equal() -> None:
    first, second = small(), small()
    assert first.tape.items[:1] != []
    of_both = [[item for item in one.tape.items if isinstance(item, Kernel | Collective)] for one in (first, second)]
    assert of_both[0] == of_both[1]
    assert replay(first, CARDS["H100"], SLOW).seconds == seconds(second)
    assert first.peak_bytes == second.peak_bytes


@pytest.mark.spec("SIMULATE-15")
def test_recording_leaves_no_trace_in_torch() -> None:
    def patched() -> list[Any]:
        attention = torch.nn.functional.scaled_dot_product_attention
        return [torch.UntypedStorage.resize_, torch.Tensor.record_stream, attention]

    before = patched()
    small()
    assert patched() == before
    assert "torch.meta" not in sys.modules
    assert not dist.is_initialized()
    assert events.recorder is None


@pytest.mark.spec("SIMULATE-15")
@ranks(1)
def test_recording_refuses_a_process_with_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"this process has a process group already\. Record in another process"):
        small()


@pytest.mark.spec("SIMULATE-15")
def test_importing_minifsdp_imports_no_tool() -> None:
    program = "import sys, minifsdp; print([name for name in sys.modules if name.startswith('minifsdp_tools')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
