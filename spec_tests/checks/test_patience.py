"""How long the watchdog waits for a collective does not depend on the collectives before it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.checks.collective_log import log
from minifsdp.watchdog.watchdog import PATIENCE, Watchdog
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel


@pytest.mark.spec("LEDGER-03")
@pytest.mark.pure
def test_after_a_slow_collective_the_next_one_is_examined_as_early_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Defect: the longer wait after an examination stays for later collectives, so a later hang is reported late."""
    this: Any = SimpleNamespace(_stuck_at=None, _stuck_since=0.0, _patience=PATIENCE)
    for position in range(3):
        monkeypatch.setattr(log, "waiting", SimpleNamespace(position=position))
        assert not Watchdog._is_stuck(this)
        this._stuck_since -= PATIENCE + 0.1
        assert Watchdog._is_stuck(this)
        # Each examination of the same collective doubles the time until the next one.
        this._patience *= 8
        assert not Watchdog._is_stuck(this)


@pytest.mark.spec("LEDGER-03", "LEDGER-05")
@pytest.mark.cpu
@ranks(2)
def test_a_rank_that_does_not_answer_delays_a_report_by_seconds_and_not_by_minutes() -> None:
    FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=device())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(log.watchdog, "_answer", lambda: None)
        dist.barrier()
        if dist.get_rank() == 0:
            begun = time.monotonic()
            report = log.watchdog.ask(None)
            assert time.monotonic() - begun < 10.0
            assert "rank 1" in report
        dist.barrier()
