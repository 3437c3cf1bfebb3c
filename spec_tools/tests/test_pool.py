"""The pool of ranks: its behaviour when a body fails, hangs, dies or changes global state.

The bodies below run through `ranks`, as in the suite. The tests catch and check the failure that the suite would
report. They have their own pool, always on the CPU.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import pool, ranks


@pytest.fixture(autouse=True, scope="module")
def own_pools() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_pools", {})
        patch.setattr(pool, "_device_kind", "cpu")
        patch.setattr(pool, "GRACE", 0.5)
        yield
        pool.close_all()


def failure_of(body: Callable[..., None], **arguments: object) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        body(**arguments)
    return str(caught.value)


@ranks(2)
def note_process(folder: pathlib.Path) -> None:
    (folder / f"{os.getpid()}").touch()


def processes_used(folder: pathlib.Path) -> set[str]:
    folder.mkdir()
    note_process(folder=folder)
    return {path.name for path in folder.iterdir()}


@ranks(2)
def do_nothing() -> None:
    pass


# ---- a test that fails ----------------------------------------------------------------------------------------------


@ranks(2)
def fail_on_rank_1(expected: list[str]) -> None:
    if dist.get_rank() == 1:
        order = ["AG 0", "F 0"]
        assert order == expected
    dist.barrier()


def test_a_rank_that_raises_fails_the_test_at_once_with_its_traceback() -> None:
    do_nothing()
    start = time.monotonic()
    text = failure_of(fail_on_rank_1, expected=["AG 0", "B 0"])
    assert time.monotonic() - start < 20, "rank 0 waits in its barrier for 45 s"
    assert text.startswith("--- rank 1 ---\n")
    assert "in fail_on_rank_1" in text
    assert "assert order == expected" in text
    assert "At index 1 diff: 'F 0' != 'B 0'" in text, "no assertion rewriting on the ranks"
    assert "worker.py" not in text.split("--- rank 0")[0], "frames of the harness"
    assert "rank 0 did not answer" in text
    assert "in barrier" in text


def test_after_a_failure_new_processes_serve_the_next_test(tmp_path: pathlib.Path) -> None:
    before = processes_used(tmp_path / "before")
    failure_of(fail_on_rank_1, expected=[])
    after = processes_used(tmp_path / "after")
    assert not before & after
    assert not any(pathlib.Path(f"/proc/{process}").exists() for process in before)


def sleep_on_rank_0() -> None:
    time.sleep(60)


@ranks(2, timeout=2)
def hang() -> None:
    if dist.get_rank() == 0:
        sleep_on_rank_0()
    time.sleep(60)


def test_hang_ends_with_stacks_of_all_ranks() -> None:
    do_nothing()
    start = time.monotonic()
    text = failure_of(hang)
    assert 2 < time.monotonic() - start < 20
    assert "no answer from ranks [0, 1] after 2 s" in text
    rank_0, rank_1 = text.split("--- rank 1 did not answer")
    assert "in sleep_on_rank_0" in rank_0
    assert "in hang" in rank_0
    assert "in sleep_on_rank_0" not in rank_1
    assert "in hang" in rank_1


@ranks(2)
def crash_on_rank_1() -> None:
    print("before the crash", dist.get_rank())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_crashed_rank_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--- rank 1 ---\nthe process died: SIGSEGV" in failure_of(crash_on_rank_1)
    assert "before the crash 1" in capsys.readouterr().out


@ranks(2)
def skip() -> None:
    pytest.skip("not today")


@ranks(2)
def issue_one_collective_more_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


@ranks(2)
def warn() -> None:
    warnings.warn("only a word", UserWarning, stacklevel=1)


def test_a_body_that_skips_warns_or_issues_different_collectives_fails() -> None:
    assert "either passes or fails" in failure_of(skip)
    assert "UserWarning: only a word" in failure_of(warn)
    assert "out of step" in failure_of(issue_one_collective_more_on_rank_0)
    do_nothing()


# ---- state that a test leaves ---------------------------------------------------------------------------------------


@ranks(2)
def make_a_mess() -> None:
    random.random()
    torch.rand(1)
    os.environ["RANK"] = "7"
    os.environ["MESS"] = "made"
    os.chdir("/")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")


@ranks(2)
def expect_order(folder: pathlib.Path) -> None:
    assert os.environ["RANK"] == str(dist.get_rank())
    assert "MESS" not in os.environ
    assert pathlib.Path.cwd() == folder
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float32, "cpu")
    assert torch.get_num_threads() == 1
    drawn = [random.random(), torch.rand(1).item()]
    random.seed(0)
    torch.manual_seed(0)
    assert drawn == [random.random(), torch.rand(1).item()]
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", UserWarning, stacklevel=1)


def test_next_test_starts_with_the_restored_state() -> None:
    make_a_mess()
    expect_order(folder=pathlib.Path.cwd())
