"""The pool of ranks: its behaviour when a body fails, hangs, dies or changes global state.

The bodies below run through `ranks`, as in the suite. The tests catch and check the failure that the suite would
report. They have their own pool, always on the CPU.
"""

from __future__ import annotations

import os
import pathlib
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spec_tests.harness import pool, ranks
from spec_tests.harness.worker import leftover_groups


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


# ---- a test that passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_a_body_runs_on_every_rank_with_its_parameters(flag: bool, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    total = torch.full((2,), float(dist.get_rank() + flag), dtype=dtype)
    dist.all_reduce(total)
    assert total.tolist() == [1.0 + 2 * flag] * 2
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@ranks(1)
def test_one_rank_has_a_group_of_its_own() -> None:
    assert dist.get_world_size() == 1
    dist.all_reduce(torch.ones(1))


@ranks(4)
def test_the_environment_is_that_of_torchrun_on_one_node() -> None:
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == [rank, rank, "0"]
    assert [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [num_ranks, num_ranks]
    assert torch.get_num_threads() == 1


@ranks(2)
def note_process(folder: pathlib.Path) -> None:
    (folder / f"{os.getpid()}").touch()


def processes_used(folder: pathlib.Path) -> set[str]:
    folder.mkdir()
    note_process(folder=folder)
    return {path.name for path in folder.iterdir()}


def test_the_same_processes_serve_one_test_after_the_other(tmp_path: pathlib.Path) -> None:
    assert processes_used(tmp_path / "first") == processes_used(tmp_path / "second")
    assert len(processes_used(tmp_path / "third")) == 2


@ranks(2)
def do_nothing() -> None:
    pass


def test_a_test_on_a_pool_that_runs_costs_milliseconds() -> None:
    do_nothing()
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        do_nothing()
        seconds.append(time.perf_counter() - start)
    # Ten times the measurement on idle cores. A pool that is started for each test takes a hundred times as long.
    assert statistics.median(seconds) < 0.05


@ranks(2)
def print_greetings() -> None:
    print(f"greetings from {dist.get_rank()}")
    os.write(2, b"and from below Python\n")


def test_output_is_printed_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    print_greetings()
    one, two = capsys.readouterr().out.split("--- output of rank 1 ---")
    assert "greetings from 0" in one
    assert "and from below Python" in one
    assert "greetings from 1" in two
    do_nothing()
    assert capsys.readouterr().out == "", "the output of an earlier test"


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


@ranks(2, timeout=2)
def hang_on_rank_0_only() -> None:
    if dist.get_rank() == 0:
        sleep_on_rank_0()


def test_hang_report_also_lists_finished_ranks() -> None:
    text = failure_of(hang_on_rank_0_only)
    assert "no answer from ranks [0] after 2 s" in text
    assert "rank 0 did not answer" in text
    assert "rank 1 has finished its body" in text


@ranks(2, timeout=4)
def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        sleep_on_rank_0()


def test_collective_without_other_ranks_times_out() -> None:
    do_nothing()
    text = failure_of(wait_for_nobody)
    assert text.startswith("--- rank 0 ---")
    assert "in wait_for_nobody" in text
    assert "Timed out" in text


@ranks(2)
def die_on_rank_1(how: str) -> None:
    print("last words", dist.get_rank())
    if dist.get_rank() == 1 and how == "exit":
        os._exit(3)
    elif dist.get_rank() == 1:
        os.kill(os.getpid(), 11)


@pytest.mark.parametrize(("how", "word"), [("exit", "exit code 3"), ("segfault", "SIGSEGV")])
def test_exited_rank_is_named_with_the_reason(how: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--- rank 1 ---\nthe process died: {word}" in failure_of(die_on_rank_1, how=how)
    assert "last words 1" in capsys.readouterr().out


@ranks(2)
def leave_in_the_middle(how: str) -> None:
    if how == "exit":
        sys.exit(0)
    (pytest.skip if how == "skip" else pytest.xfail)("not today")


@pytest.mark.parametrize("how", ["skip", "xfail", "exit"])
def test_test_body_must_not_skip_or_exit(how: str) -> None:
    text = failure_of(leave_in_the_middle, how=how)
    assert ("SystemExit" if how == "exit" else "either passes or fails") in text


@ranks(2)
def issue_one_collective_more_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def test_different_numbers_of_collectives_fail_the_test_that_issues_them() -> None:
    assert "out of step" in failure_of(issue_one_collective_more_on_rank_0)
    do_nothing()


@ranks(2)
def send_and_receive() -> None:
    number = torch.zeros(1)
    for _ in range(3):
        if dist.get_rank() == 0:
            dist.send(number, 1)
        else:
            dist.recv(number, 0)


def test_messages_between_two_ranks_do_not_count_as_out_of_step() -> None:
    send_and_receive()


def test_argument_that_cannot_be_pickled_raises_and_keeps_the_pool(tmp_path: pathlib.Path) -> None:
    before = processes_used(tmp_path / "before")
    with pytest.raises(TypeError, match=r"\['folder'\].*cannot be"):
        note_process(folder=lambda: None)
    assert processes_used(tmp_path / "after") == before


def test_nested_test_body_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="top of its module"):
        ranks(2)(inner)


@ranks(2)
def warn() -> None:
    warnings.warn("only a word", UserWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error() -> None:
    assert "UserWarning: only a word" in failure_of(warn)


@pytest.mark.filterwarnings("ignore:only a word:UserWarning")
def test_a_filter_of_the_test_counts_on_the_ranks() -> None:
    warn()


# ---- state that a test leaves ---------------------------------------------------------------------------------------


@ranks(4)
def make_groups_and_meshes() -> None:
    assert leftover_groups() == [], "groups of an earlier test"
    dist.new_group([0, 1])
    dist.new_group([2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(16.0).view(4, 4)
    rows = distribute_tensor(full, mesh["shard"], [Shard(0)])
    product = rows @ rows.redistribute(placements=[Replicate()])
    assert isinstance(product, DTensor)
    columns = product.redistribute(placements=[Shard(1)])
    assert torch.equal(columns.full_tensor(), full @ full)


def test_groups_and_meshes_are_removed_after_each_test() -> None:
    # Repeated, because destroying a group too early breaks only a slow rank.
    for _ in range(6):
        make_groups_and_meshes()


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


@ranks(2)
def leave_the_default_group(meet_again: bool) -> None:
    dist.destroy_process_group()
    if meet_again:
        dist.init_process_group("gloo")
        dist.barrier()


@pytest.mark.parametrize("meet_again", [True, False])
def test_a_test_may_leave_the_default_group(meet_again: bool) -> None:
    leave_the_default_group(meet_again=meet_again)
    make_a_mess()
    expect_order(folder=pathlib.Path.cwd())
