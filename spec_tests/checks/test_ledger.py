"""The fields that the collective log records for each collective, and the small cost of recording."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp.checks.collective import Collective
from minifsdp.checks.collective_log import CollectiveLog, log
from minifsdp.checks.place import way_out_of_main_thread
from minifsdp.engine.events import events
from minifsdp.engine.mesh import Group
from minifsdp.watchdog import process, report
from minifsdp.watchdog.process import write_report
from minifsdp.watchdog.report import (
    Findings,
    StoreChannel,
    lines_of_this_rank,
    state_of_this_rank,
)
from minifsdp.watchdog.watchdog import LIMIT, PATIENCE, close
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, chain
from spec_tests.models.small import draw, shard_each, train_once, units_of
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardedGradScaler, StateDictType
from spec_tests.waiting import comes_true


def entries() -> list[Any]:
    """The entries of all groups. In these tests, one group communicates."""
    names = ["group", "epoch", "number", "kind", "unit", "parts", "num_bytes", "iteration"]
    names += ["identity", "of_unit", "inside", "code", "line"]
    every = [fields for sequence in log.sequences.values() for fields in sequence.entries]
    return [SimpleNamespace(**dict(zip(names, fields, strict=True))) for fields in every]


def clear_entries() -> None:
    for sequence in log.sequences.values():
        sequence.entries.clear()


def line_of(word: str) -> int:
    """The number of the line in this file that ends with the comment ``word``."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {word}"))


@pytest.mark.spec("LEDGER-01")
@pytest.mark.not_simulated("a frame of the simulation calls the backward")
@pytest.mark.parametrize("fails_in", [None, "forward", "backward"])
@ranks(2)
def test_collective_log_has_all_data_of_the_collectives_of_a_step(fails_in: str | None) -> None:
    model = shard_each(chain(2))
    train_once(model)
    clear_entries()
    iteration = log.iteration
    fail = Mock(side_effect=LookupError)
    handle = model.module[1].register_forward_pre_hook(fail) if fails_in == "forward" else Mock()
    with contextlib.suppress(LookupError):
        output = model(draw(dist.get_rank()))  # the forward
        if fails_in == "backward":
            output.register_hook(fail)
        output.sum().backward()  # the backward
        gathers = ["all-gather 0", "all-gather 1", "all-gather 1", "all-gather 0"]
        said = [f"{entry.kind} {entry.unit}" for entry in entries()]
        assert said == [*gathers, "reduce-scatter 1", "reduce-scatter 0", "order check None"]
        # A weight and a bias of each layer, and their padding.
        assert {entry.num_bytes for entry in entries() if entry.kind == "all-gather"} == {128}
        assert {entry.iteration for entry in entries()} == {iteration + 1}
        assert lines_of_this_rank()[0][3] == "all-gather of '0' in forward"
        assert lines_of_this_rank()[-1][3] == "order check in backward"
    handle.remove()
    model(draw(dist.get_rank()))  # the next forward
    units_of(model)[0].unshard()  # the call
    assert {entry.code.co_filename for entry in entries()} == {__file__}
    words = ["the forward", "the backward", "the next forward", "the call"]
    if fails_in is not None:
        # The hook raises before the first collective of the backward.
        words.remove("the backward")
    lines = dict.fromkeys(entry.line for entry in entries() if entry.unit is not None)
    assert list(lines) == [line_of(word) for word in words]


@pytest.mark.spec("LEDGER-01")
@ranks(2)
def test_collective_log_includes_state_dicts_clipping_and_the_scaler() -> None:
    model = FSDP(MLP(), device_id=device())
    model(torch.ones(2, 8, device=device())).sum().backward()
    clear_entries()
    model.clip_grad_norm_(1.0)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()
    scaler = ShardedGradScaler(device().type, init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(1, device=device()))
    scaler.unscale_(optimizer)
    called = {line[3].rpartition(" in ")[2] for line in lines_of_this_rank()}
    assert {"clip_grad_norm_", "state_dict", "unscale_"} <= called


@pytest.mark.spec("LEDGER-01")
@ranks(2)
def test_log_is_bounded_and_the_position_of_the_main_thread_keeps_no_frame() -> None:
    group = Group.of(dist.group.WORLD)
    for _ in range(2049):
        Collective("all-gather", group, [], lambda: None)
    assert len(log.sequence_of(group).entries) == 2048
    # The watchdog reports the main thread's position while the thread runs, so it must not keep frames with tensors.
    assert not any(isinstance(part, FrameType) for part in way_out_of_main_thread())


@pytest.mark.spec("ORDER-08", "LEDGER-01")
@pytest.mark.parametrize("fails_in", ["an all-gather of one rank", "backward"])
@ranks(2)
def test_failure_leaves_no_name_of_a_unit_for_later_collectives(fails_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shard_each(chain())
    train_once(model)
    fail = Mock(side_effect=LookupError)
    if fails_in == "backward":
        # When this hook runs, backward has issued the reductions of two units.
        handle = model.module[0].register_full_backward_pre_hook(fail)
        with pytest.raises(LookupError):
            train_once(model)
        handle.remove()
    elif dist.get_rank() == 0:
        unit = units_of(model)[0]
        with monkeypatch.context() as patched, pytest.raises(LookupError):
            patched.setattr(unit.layout, "all_gather", fail)
            unit.unshard()
    clear_entries()
    model.clip_grad_norm_(1.0)
    assert [(entry.kind, entry.unit) for entry in entries()] == [("all_reduce of the 2.0-norm", None)]
    # In this step, the ranks compare their collectives.
    train_once(model)


@pytest.mark.spec("LEDGER-11")
@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, KeyboardInterrupt])
@ranks(2)
def test_failed_collective_is_no_longer_recorded_as_waiting(error: type[BaseException]) -> None:
    group, fail = Group.of(dist.new_group([0, 1])), Mock(side_effect=error)
    with pytest.raises(error):
        Collective("all-gather", group, [], fail)
    assert log.waiting is None
    with pytest.raises(error):
        Collective("all-gather", group, [], lambda: SimpleNamespace(wait=fail)).wait()
    assert log.waiting is None


@pytest.mark.spec("LEDGER-13")
@pytest.mark.cpu
@ranks(3)
def test_slow_rank_causes_no_repeated_file_and_no_repeated_list() -> None:
    model = FSDP(MLP(), device_id=device())
    model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    reported, published, asked = [], [], []
    publish, ask = StoreChannel.publish, StoreChannel.ask
    with pytest.MonkeyPatch.context() as patch:
        dumps = json.dumps
        patch.setattr(json, "dumps", lambda what: (reported.append("report" in what), dumps(what))[1])
        patch.setattr(StoreChannel, "publish", lambda *args: (published.append(args), publish(*args))[1])
        patch.setattr(StoreChannel, "ask", lambda self: (asked.append(self), ask(self))[1])
        if dist.get_rank() == 2:
            time.sleep(PATIENCE + 3 * LIMIT)
        model(torch.ones(2, 8)).sum().backward()
        dist.barrier()
    assert not any(reported)
    numbers = [number for _, _, what, number, _ in published if what == "list"]
    assert len({*numbers}) == len(numbers), "once for each request"
    # One of the two waiting ranks reports for both.
    assert bool(numbers) == (dist.get_rank() != 1)
    if dist.get_rank() == 2:
        assert not asked


@pytest.mark.spec("LEDGER-14")
@ranks(2)
def test_watchdog_continues_after_failed_check() -> None:
    FSDP(MLP(), device_id=device())
    watchdog: Any = log.watchdog
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog._channel, "publish", Mock(side_effect=LookupError))
        watchdog.ask(None)
    dist.barrier()
    said = watchdog.ask(None)
    for rank in range(2):
        assert re.search(rf"ranks? [01, ]*{rank}[01, ]*: .*test_ledger.py:\d+, iteration", said), said
    dist.barrier()


@pytest.mark.spec("LEDGER-14")
@pytest.mark.pure
def test_collective_logs_may_be_created_during_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = [Event() for _ in range(9)]
    fresh = CollectiveLog()
    monkeypatch.setattr(report, "log", fresh)
    fresh.sequence_of(Group(groups[0], 1, 0, (0,)))
    left = iter(groups[1:])

    def make_one(frame: Any, *_: Any) -> Any:
        # Another thread may do this between any two lines of Python.
        if frame.f_code.co_filename == weakref.__file__ and frame.f_code.co_name == "values":
            for group in left:
                fresh.sequence_of(Group(group, 1, 0, (id(group),)))
                break
        return make_one

    before = sys.gettrace()
    sys.settrace(make_one)
    try:
        said = state_of_this_rank()
    finally:
        sys.settrace(before)
    assert f"{(0,)}#1" in said["sequences"]


@pytest.mark.spec("LEDGER-19")
@pytest.mark.pure
def test_import_does_not_change_the_process() -> None:
    program = (
        "import contextlib, importlib, sys\n"
        "from spec_tests.harness.process_state import changes, state_of_process\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(ImportError):\n"
        "        importlib.import_module(name)\n"
        "before = state_of_process()\n"
        "import minifsdp\n"
        "assert changes(before, state_of_process()) == []\n"
    )
    # The program first imports the other packages that minifsdp imports.
    others = [name for name in sys.modules if name.partition(".")[0] in ("torch", "jinja2")]
    others = [name for name in others if not name.startswith(("torch.ops", "torch._C"))]
    subprocess.run([sys.executable, "-c", program, *others], check=True, timeout=120)


# --- the file of a report ---


def path_of_report() -> Path:
    """Writes a report, and returns the path that the text names."""
    return Path(write_report(Findings({})).split()[-1])


@pytest.mark.spec("LEDGER-20")
@pytest.mark.pure
def test_report_is_a_new_file_with_access_only_for_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_LEDGER_DIR", str(tmp_path))
    first = path_of_report()
    assert json.loads(first.read_text())["report"].startswith("Where every rank is:")
    assert first.stat().st_mode & 0o777 == 0o600
    first.unlink()
    target = tmp_path / "of another user"
    first.symlink_to(target)
    second = path_of_report()
    assert second != first
    assert second.is_file()
    assert not target.exists()
    monkeypatch.delenv("MINIFSDP_LEDGER_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    third = path_of_report()
    assert third.parent.parent == tmp_path
    assert third.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.spec("LEDGER-20")
@pytest.mark.pure
@pytest.mark.parametrize("place", ["off", "/dev/null/none"])
def test_a_report_needs_no_file(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_LEDGER_DIR", place)
    said = write_report(Findings({}))
    assert ("could not be written" in said) == (place != "off")
    assert "minifsdp.ledger" not in said


@pytest.mark.spec("LEDGER-17", "AGREE-11")
@pytest.mark.pure
def test_jobs_and_restarts_of_a_job_write_to_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_LEDGER_DIR", str(tmp_path))
    for pid in (10, 11):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "")
        path_of_report()
        # A run ID may contain a slash.
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "team/run")
        for count in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            assert path_of_report().name.startswith("minifsdp-ledger-team_run-")
    assert len({*tmp_path.iterdir()}) == 6


@pytest.mark.spec("LEDGER-07")
@pytest.mark.pure
def test_drawing_of_a_report_shows_the_last_collectives() -> None:
    from minifsdp.watchdog.ledger import table_of

    lines = [["world#1", n // 3, n % 3, f"all-gather {n}", "train.py:1", 0, 8, n] for n in range(4)]
    picture = table_of({"report": "", "lines": {"0": lines}}, 2)
    assert re.findall(r"epoch \d|all-gather \d", picture) == ["epoch 0", "all-gather 2", "epoch 1", "all-gather 3"]


@pytest.mark.spec("LEDGER-05")
@pytest.mark.pure
def test_the_line_of_an_error_in_a_forward_is_that_of_the_module() -> None:
    class Failing(torch.nn.Module):
        def forward(self) -> None:
            raise LookupError  # the line of the error

    with pytest.raises(LookupError) as caught:
        Failing()()
    assert process._line_of(caught.tb) == f"test_ledger.py:{line_of('the line of the error')}"


@pytest.mark.spec("LEDGER-13")
@pytest.mark.pure
def test_one_of_the_waiting_ranks_prints_that_all_ranks_wait(capsys: pytest.CaptureFixture[str]) -> None:
    from minifsdp.watchdog.watchdog import Watchdog

    waits = {"ended": "", "place": "train.py:1", "iteration": 0, "waits": "all-gather of 'a'", "last": ""}
    found = Findings({0: {**waits, "waits": ""}, 1: waits, 2: waits})
    position: Any = SimpleNamespace(ranks=(0, 1, 2)), 0, 0
    prints = []
    for rank in range(3):
        this: Any = SimpleNamespace(_patience=100 * PATIENCE, _has_printed=False, _channel=SimpleNamespace(rank=rank))
        for _ in range(2):
            Watchdog._print_once(this, position, found)
        prints.append(capsys.readouterr().err.count("all ranks keep waiting"))
    assert prints == [0, 1, 0]


@pytest.mark.spec("LEDGER-21")
@ranks(2)
def test_event_is_queried_only_after_a_delay_and_then_dropped() -> None:
    FSDP(MLP(), device_id=device())
    queries: list[float] = []

    def query() -> bool:
        queries.append(time.monotonic())
        return True

    events.last_event, begun = SimpleNamespace(query=query), time.monotonic()
    assert comes_true(lambda: events.last_event is None)
    assert len(queries) == 1
    assert queries[0] - begun >= PATIENCE - 0.1


@pytest.mark.spec("LEDGER-15")
@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL], ids=["plain", "wrapped"])
@pytest.mark.cpu
@ranks(2)
def test_closing_a_group_that_torch_wraps_ends_its_waits(level: Any) -> None:
    dist.set_debug_level(level)
    try:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    # Receive a message that the other rank never sends.
    waits = dist.irecv(torch.zeros(1), 1 - dist.get_rank(), group)
    assert waits is not None
    dist.barrier()
    begun = time.monotonic()
    if dist.get_rank() == 0:
        close(group)
    with pytest.raises(RuntimeError):
        waits.wait()
    assert time.monotonic() - begun < 10.0


@pytest.mark.spec("LEDGER-02")
@ranks(2)
def test_a_forward_that_does_not_begin_leaves_no_place_for_later_collectives() -> None:
    model = minifsdp.fully_shard(nn.Sequential(minifsdp.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    model(torch.ones(1, 4))
    weight, number = model[1].weight, log.iteration
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="replaced"):
        model(torch.ones(1, 4))
    assert (log.place, log.iteration) == (None, number)
    model[1].weight = weight
