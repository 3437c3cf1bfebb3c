"""The errors of all ranks when one rank does something else, ends, fails, or is killed in a training."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from minifsdp.watchdog.report import LOST
from spec_tests.harness.programs import run_module
from spec_tools.processes.ranks import ROOT, Ranks, start

pytestmark = pytest.mark.pure
IN_SECONDS = 20.0  # instead of after five minutes
APIS = ("wrapper", "function")
each_api = pytest.mark.parametrize("api", APIS)


def deviate(
    folder: Path, api: str, what: str, num_ranks: int = 2, limit: float = IN_SECONDS
) -> tuple[list[int | None], Ranks]:
    """The exit statuses of the ranks, which must end in time, and the ranks."""
    with start("spec_tools.processes.deviate", api, what, folder=folder, num_ranks=num_ranks) as ranks:
        codes = ranks.wait(limit)
    assert None not in codes, f"still there: {codes}\n{ranks.all_errors()}"
    return codes, ranks


@pytest.mark.spec("LEDGER-02", "LEDGER-03", "LEDGER-04", "LEDGER-07")
@each_api
def test_divergent_ranks_are_reported_within_seconds_and_in_one_file(api: str, tmp_path: Path) -> None:
    # The main thread of each rank waits in C++ while the other rank asks it.
    codes, ranks = deviate(tmp_path, api, "leaves out")
    assert codes == [1, 1]
    for rank in range(2):
        said = ranks.errors(rank)
        assert re.search(r"The ranks diverge at collective 0 of group \S+ since its last comparison:", said)
        assert re.search(r"rank 0: all-gather of 'a' in forward \(deviate.py:\d+\)", said)
        assert re.search(r"rank 1: all-gather of 'b' in forward \(deviate.py:\d+\)", said)
    assert "a collective between ranks [0, 1] cannot complete" in ranks.all_errors()
    files = sorted(tmp_path.glob("minifsdp-ledger-*.json"))
    assert ["rank0" in file.name for file in files] == [True, False]
    assert f"To draw the report: python -m minifsdp.ledger {files[0]}" in ranks.errors(0)
    done = run_module("minifsdp.ledger", str(files[0]), "--last", "6", folder=ROOT, environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Where every rank is:" in done.stdout
    assert re.search(r"group \S+, epoch \d+ +rank 0 +rank 1", done.stdout)
    assert re.search(r"\d +>? +all-gather of 'a' in forward \(deviate.py:\d+\)", done.stdout)


@pytest.mark.spec("ORDER-10")
@pytest.mark.parametrize("when", ["early", "late"])
@each_api
def test_no_data_is_sent_to_a_rank_that_expects_another_size(
    api: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a transport, a rank cannot check with the others before it sends.
    monkeypatch.delenv("MINIFSDP_TRANSPORT", raising=False)
    codes, ranks = deviate(tmp_path, api, f"swaps layers of other sizes {when}")
    assert codes == [1, 1]
    for said in map(ranks.errors, range(2)):
        assert "gloo::EnforceNotMet" not in said
        assert "are about to issue different collectives" in said or "cannot complete" in said or " failed: " in said
        assert "rank 0: all-gather of 'a' in forward" in said
        assert "rank 1: all-gather of 'b' in forward" in said


@pytest.mark.spec("LEDGER-07", "LEDGER-11", "ORDER-10")
@each_api
def test_caught_order_difference_affects_no_later_check_and_leaves_no_file(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIFSDP_TRANSPORT", raising=False)
    codes, ranks = deviate(tmp_path, api, "catches that it swaps layers of other sizes")
    assert codes == [0, 0], ranks.all_errors()
    for rank in range(2):
        assert "are about to issue different collectives" in ranks.output(rank)
    assert [*tmp_path.glob("minifsdp-ledger-*")] == []


@pytest.mark.spec("ORDER-04", "ORDER-06", "ORDER-13", "LEDGER-03")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("what", ["no_sync", "keeps and no_sync"])
@each_api
def test_no_sync_on_one_rank_is_noticed(api: str, what: str, num_ranks: int, tmp_path: Path) -> None:
    # On a mesh of four, ranks 2 and 3 share a shard group and agree. They wait for their replicas.
    codes, ranks = deviate(tmp_path, api, what, num_ranks)
    if (api, what) == ("wrapper", "keeps and no_sync"):
        # Unequal numbers of micro-batches are correct. Only the optimizer steps show the error, and no collective does.
        assert codes == [1, 0, 1, 1][:num_ranks]
        assert "optimizers have stepped on ranks [1] only" in ranks.all_errors()
        assert num_ranks == 4 or "rank 1: has ended, at the end of its program" in ranks.all_errors()
        return
    assert codes == [1] * num_ranks
    assert "The ranks diverge at" in ranks.all_errors()
    assert re.search(r"rank 1: (order check in backward|all-gather of '[ab]' in forward)", ranks.all_errors())


HOST_ENDS = {
    "ends": (0, "rank 0: has ended, at the end of its program"),
    "killed": (
        -signal.SIGKILL,
        "The state of the other ranks is unknown: the host of the store, usually rank 0, has ended.",
    ),
}


@pytest.mark.spec("LEDGER-16")
@pytest.mark.parametrize("what", HOST_ENDS)
def test_rank_reports_its_position_and_loss_of_store_host(what: str, tmp_path: Path) -> None:
    codes, ranks = deviate(tmp_path, "wrapper", f"is the host and {what}")
    status, words = HOST_ENDS[what]
    assert codes == [status, 1]
    assert words in ranks.errors(1)
    assert re.search(r"rank 1: .*deviate.py:\d+, iteration \d+; waits for", ranks.errors(1))


@pytest.mark.spec("LEDGER-03")
def test_stuck_device_is_detected(tmp_path: Path) -> None:
    codes, ranks = deviate(tmp_path, "wrapper", "has a stuck device")
    assert codes == [1, 0]
    # Printed by the watchdog, and raised by the next collective.
    assert ranks.errors(0).count("a collective between ranks [0, 1] cannot complete") == 2
    assert "rank 1: has ended, at the end of its program" in ranks.errors(0)


@pytest.mark.spec("LEDGER-08", "LEDGER-05")
def test_an_error_of_a_collective_of_torch_is_followed_by_the_same_report(tmp_path: Path) -> None:
    codes, ranks = deviate(tmp_path, "function", "reads a DTensor")
    assert codes == [1, -signal.SIGKILL]
    assert "the error above comes from a collective that minifsdp did not issue" in ranks.errors(0)
    assert f"rank 1: has ended, {LOST}" in ranks.errors(0)


@pytest.mark.spec("LEDGER-18")
def test_wait_for_killed_rank_ends_with_message(tmp_path: Path) -> None:
    codes, ranks = deviate(tmp_path, "wrapper", "is killed before a state dict")
    assert codes == [1, -signal.SIGKILL]
    assert "state_dict() must be called by all of the ranks [0, 1]" in ranks.errors(0)
    assert f"rank 1: has ended, {LOST}" in ranks.errors(0)


@pytest.mark.spec("LEDGER-15")
@pytest.mark.parametrize("what", ["leaves out", "asks for a state dict"])
def test_wrapped_torch_groups_still_detect_divergent_ranks(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    codes, ranks = deviate(tmp_path, "wrapper", what)
    assert codes == [1, 1], ranks.all_errors()


@pytest.mark.spec("LEDGER-12")
def test_errors_of_earlier_process_groups_are_removed(tmp_path: Path) -> None:
    codes, ranks = deviate(tmp_path, str(tmp_path), "starts again", limit=60.0)
    assert codes == [0, 0], ranks.all_errors()
    for rank in range(2):
        assert ranks.output(rank).count("the watchdog has ended: True") == 2
    assert (ranks.output(0) + ranks.output(1)).count("caught True") >= 2
