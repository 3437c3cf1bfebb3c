"""The watchdog's thread and an accelerator: the state that its queries do not change, and the effects of a hang of the
device."""

from __future__ import annotations

import ctypes
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.checks.collective_log import log
from minifsdp.engine.events import events
from minifsdp.engine.messages import message
from minifsdp.watchdog import process, watchdog
from minifsdp.watchdog.watchdog import close
from spec_tests.harness import device, rank_among_fake_ranks, ranks
from spec_tests.harness.programs import outcome_of_ranks
from spec_tests.harness.simulated import WORLD
from spec_tests.subject import fully_shard

SILENCE = watchdog.PATIENCE + 1.0  # seconds after which the watchdog has queried the last event


def step(model: nn.Module) -> None:
    model(torch.ones(4, 8, device=device())).sum().backward()


@pytest.mark.spec("LEDGER-21")
@pytest.mark.proof("order only")
@pytest.mark.pure
def test_event_is_queried_on_its_device_and_apart_from_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def on(which: Any) -> Any:
        calls.append(f"on {which}")
        yield
        calls.append("off")

    def exchange(mode: Any) -> None:
        calls.append(ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0])

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=on))
    library = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    event = SimpleNamespace(device="cuda:1", query=lambda: calls.append("query"))
    assert not watchdog._is_complete(event)
    assert calls == ["on cuda:1", 1, "query", "off"]


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("LEDGER-21")
@pytest.mark.parametrize("sets_mode", [True, False], ids=["sets its mode", "mode of a new thread"])
@rank_among_fake_ranks(2)
def test_query_of_the_watchdog_keeps_a_capture_valid(sets_mode: bool) -> None:
    module = torch.get_device_module(device())
    modes = ("global", "thread_local", "relaxed")

    def exchange(mode: Any) -> None:
        module.exchange_capture_mode(modes[mode._obj.value])

    library = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange) if sets_mode else SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(ctypes, "CDLL", lambda _: library)
        step(fully_shard(nn.Linear(8, 8, device=device())))
        assert events.last_event is not None
        error = nullcontext() if sets_mode else pytest.raises(RuntimeError, match="not permitted")
        ends = nullcontext() if sets_mode else pytest.raises(RuntimeError, match="during capture")
        with ends, module.graph(module.CUDAGraph()), error:
            assert thread.submit(watchdog._is_complete, events.last_event).result(timeout=30)


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("LEDGER-22")
@rank_among_fake_ranks(2)
def test_no_parameter_is_updated_with_the_output_of_an_aborted_collective() -> None:
    group: Any = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, device().type)
    model = fully_shard(nn.Linear(8, 8, device=device()), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step(model)
    optimizer.step()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    group.lose_peers()
    step(model)
    event = torch.get_device_module(device()).current_stream().record_event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(close, group).result(timeout=30)
    event.synchronize()
    assert {race.kind for race in WORLD.races.values()} == {"garbage"}
    WORLD.races.clear()
    log.fatal_error = "an aborted collective"
    try:
        with pytest.raises(RuntimeError, match="an aborted collective"):
            optimizer.step()
    finally:
        log.fatal_error = ""
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)


@pytest.mark.spec("LEDGER-21")
@pytest.mark.gpu
@ranks(2)
def test_captures_after_a_step_are_valid() -> None:
    step(fully_shard(nn.Linear(8, 8, device=device())))
    values = torch.ones(1000, device=device())
    # Later kernels keep the last event incomplete while the watchdog queries it.
    for _ in range(3):
        step(fully_shard(nn.Linear(8, 8, device=device())))
        events.last_event = _late_event()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            values.mul(2)
            time.sleep(SILENCE)
    torch.cuda.synchronize()


def _late_event() -> torch.cuda.Event:
    """An event that the device reaches after some seconds, on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000_000)
    return stream.record_event()


@pytest.mark.spec("LEDGER-21")
@pytest.mark.gpu
@pytest.mark.own_gpus
@ranks(2)
def test_the_watchdog_creates_no_context_on_another_device() -> None:
    model = fully_shard(nn.Linear(8, 8, device=device()))
    for _ in range(3):
        step(model)
    time.sleep(SILENCE)
    assert events.last_event is None
    others = [index for index in range(torch.cuda.device_count()) if index != device().index]
    assert [index for index in others if torch._C._cuda_hasPrimaryContext(index)] == []
    dist.barrier()


@pytest.mark.spec("LEDGER-22")
@ranks(2)
def test_after_an_abort_an_optimizer_of_the_model_raises_and_others_step() -> None:
    model, other = fully_shard(nn.Linear(8, 8).to(device())), nn.Linear(2, 2).to(device())
    step(model)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    other(torch.ones(1, 2, device=device())).sum().backward()
    log.fatal_error = "an aborted collective"
    try:
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        with pytest.raises(RuntimeError, match="an aborted collective"):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    finally:
        log.fatal_error = ""
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)


@pytest.mark.spec("LEDGER-22", "LEDGER-03", "LEDGER-13")
@pytest.mark.pure
@pytest.mark.parametrize("continues", [False, True], ids=["waits", "continues"])
@pytest.mark.parametrize("on_device", [False, True], ids=["CPU", "device"])
def test_report_is_printed_before_the_abort_on_an_accelerator(
    on_device: bool, continues: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that continues while the other ranks answer keeps its groups."""
    printed: list[str] = []
    sequence = SimpleNamespace(ranks=(0, 1), process_group=lambda: "group")
    own: Any = SimpleNamespace(last_position=(sequence, 0, 0), waiting=object(), fatal_error="")
    monkeypatch.setattr(watchdog, "log", own)
    monkeypatch.setattr(watchdog, "close", lambda _: printed.append(capsys.readouterr().err))

    def find(*_: Any) -> Any:
        own.last_position = (sequence, 0, int(continues))
        return SimpleNamespace(prove_a_hang=lambda *_, **__: True, text=lambda: "the report")

    rank: Any = SimpleNamespace(_patience=1.0, _answered={"state": 0}, _answered_at=0.0, _find=find)
    rank._channel = SimpleNamespace(ask=lambda: 1)
    watchdog.Watchdog._examine(rank, on_device=on_device)
    assert ("the report" in own.fatal_error) is not continues
    assert ["the report" in text for text in printed] == ([] if continues else [on_device])


@pytest.mark.spec("ORDER-12")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("CUDA error: an illegal memory access was encountered", None),
        ("a collective failed", None),
        (message("order-differs", when="", report=""), "the ranks issued different collectives"),
    ],
    ids=["device", "collective", "difference"],
)
def test_an_error_of_the_device_at_the_end_is_no_difference_between_ranks(
    text: str, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(process, "_ExitStatus", lambda: None)
    monkeypatch.setattr(process, "read_all", Mock(side_effect=RuntimeError(text)))
    rank = Mock(last=None)
    process._leave_exit_record(rank)
    rank.leave.assert_called_once_with(f"by RuntimeError: {end or text}")


@pytest.mark.spec("LEDGER-22", "LEDGER-03")
@pytest.mark.gpu
def test_both_ranks_report_a_unit_that_one_leaves_out() -> None:
    script, begun = Path(__file__).with_name("leaves_out_a_unit.py"), time.monotonic()
    ended = outcome_of_ranks(script, "cuda", num_ranks=2, environment={}, limit=60.0)
    assert time.monotonic() - begun < 45.0
    for code, output in ended:
        assert code not in (0, None)
        assert "Where every rank is:" in output
