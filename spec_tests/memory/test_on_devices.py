"""Memory of an accelerator: what is allocated during and after a step, and inside ``summon_full_params``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import batch
from spec_tests.subject import BackwardPrefetch, FullyShardedDataParallel, ModuleWrapPolicy, trace

WIDTH = 1024
BLOCK_BYTES = 4 * WIDTH * (WIDTH + 1)


@pytest.mark.accelerator
@pytest.mark.spec("META-10")
@ranks(2)
def test_a_meta_model_is_never_in_full_size_on_the_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    full = sum(parameter.nbytes for parameter in model.parameters())
    memory = torch.get_device_module(device())
    before = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert memory.max_memory_allocated() - before < 0.9 * full
    assert next(model.parameters()).device == device()


@pytest.mark.accelerator
@pytest.mark.spec("LIM-02", "LIM-03", "LIM-06")
@ranks(2)
def test_without_the_rate_limiter_more_blocks_are_active_at_once() -> None:
    memory = torch.get_device_module(device())
    peaks: dict[bool, int] = {}
    waits: dict[bool, int] = {}
    for limit_all_gathers in (True, False):
        model = apis.WRAPPED.shard(seeded(lambda: Stack(WIDTH)), limit_all_gathers=limit_all_gathers)
        for _ in range(2):
            memory.synchronize(device())
            memory.reset_peak_memory_stats()
            before = memory.memory_stats()["active_bytes.all.current"]
            with trace.record() as recorder:
                model(batch(width=WIDTH)).square().mean()
            memory.synchronize(device())
        # Active, not allocated: memory that Python has freed but the device still reads must count.
        peaks[limit_all_gathers] = memory.memory_stats()["active_bytes.all.peak"] - before
        waits[limit_all_gathers] = recorder.count("WAIT")
    assert peaks[True] < 3 * BLOCK_BYTES, "two blocks, and the activations of a block"
    assert waits[True] > 0
    assert waits[False] == 0


@pytest.mark.accelerator
@pytest.mark.spec("PREF-03", "PREF-05")
@ranks(2)
def test_pre_holds_one_unit_more_than_post_in_memory() -> None:
    memory = torch.get_device_module(device())
    peaks: dict[str, int] = {}
    for setting in BackwardPrefetch:
        model = apis.WRAPPED.shard(seeded(lambda: Stack(WIDTH)), backward_prefetch=setting)
        for _ in range(2):
            loss = model(batch(width=WIDTH)).square().mean()
            memory.synchronize(device())
            memory.reset_peak_memory_stats()
            before = memory.memory_allocated()
            loss.backward()
            memory.synchronize(device())
        peaks[setting.name] = memory.max_memory_allocated() - before
    assert 0.9 * BLOCK_BYTES < peaks["BACKWARD_PRE"] - peaks["BACKWARD_POST"] < 1.1 * BLOCK_BYTES


@pytest.mark.accelerator
@pytest.mark.spec("SHARD-13")
@ranks(2)
def test_allocated_memory_drops_by_freed_bytes() -> None:
    memory = torch.get_device_module(device())
    plain = seeded(lambda: Stack(WIDTH))
    inside: list[int] = []

    def measure(*_: object) -> None:
        memory.synchronize()
        inside.append(memory.memory_allocated())

    for block in plain.blocks:
        block.register_forward_hook(measure)
    model = apis.WRAPPED.shard(plain)
    with torch.no_grad():
        for _ in range(2):
            inside.clear()
            model(batch(width=WIDTH))
    measure()
    *blocks, after = inside
    assert max(blocks) - min(blocks) < BLOCK_BYTES // 2, "four blocks were unsharded, one still is"
    assert blocks[0] - after > BLOCK_BYTES


@pytest.mark.accelerator
@pytest.mark.spec("SUMMON-06")
@ranks(2)
def test_summon_restores_the_allocated_memory_on_exit() -> None:
    model = apis.WRAPPED.shard(seeded(lambda: Stack(WIDTH)))
    memory = torch.get_device_module(device())
    before = memory.memory_allocated()
    with FullyShardedDataParallel.summon_full_params(model):
        assert memory.memory_allocated() > before + 4 * BLOCK_BYTES
    memory.synchronize()
    assert memory.memory_allocated() == before
