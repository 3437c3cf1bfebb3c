"""Training on two machines compared with one machine and with the calculator."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from dataclasses import replace
from pathlib import Path

import pytest

from minifsdp_tools.cost import sent_by_link
from spec_tests.harness import pool
from spec_tests.ports import free_port
from spec_tools.two_machines import training
from spec_tools.two_machines.machines import ROOT, NotAllowedError, TwoMachines
from spec_tools.two_machines.training import CASES, PER_MACHINE, STEPS, Case, Result

SCRIPT = str(Path(__file__).with_name("training.py"))
RATE, DELAY = 1e9, 1e-4
ARGUMENTS = [str(STEPS), f"{RATE}:{DELAY}"]
LIMIT = 300.0  # seconds
# Headers, confirmations, and the messages that are not part of the step.
OVERHEAD = 1.02

Results = dict[Case, tuple[Result, Result]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The result of each case on one machine and on two machines."""
    folder = tmp_path_factory.mktemp("training")
    files = [str(folder / name) for name in ("one", "two")]
    try:
        with TwoMachines(RATE, DELAY) as machines:
            jobs = machines.torchrun([SCRIPT, files[1], *ARGUMENTS], cwd=ROOT)
            train_on_one_machine(files[0])
            assert [each.wait(LIMIT) for each in jobs] == [0, 0]
    except NotAllowedError as reason:
        pytest.skip(f"needs network namespaces: {reason}")
    one, two = ([Result(**found["result"]) for found in json.loads(Path(file).read_text())] for file in files)
    return {case: (alone, apart) for case, alone, apart in zip(CASES, one, two, strict=True)}


def train_on_one_machine(file: str) -> None:
    """Trains on four ranks, which are forked from a process that has already imported torch."""
    pool.start_early()
    context, port = mp.get_context("forkserver"), free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port, file), daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0, 0, 0]


def rank_main(rank: int, port: int, file: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    training.main(file, *ARGUMENTS)


@pytest.mark.spec("MACHINES-03")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_equal_those_of_one_machine(case: Case, results: Results) -> None:
    one, two = results[case]
    assert two.losses == one.losses
    assert len(set(two.losses)) == len(two.losses)


@pytest.mark.spec("MACHINES-03")
def test_losses_of_strategies_and_apis_agree(results: Results) -> None:
    first, *others = (two.losses for _, two in results.values())
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)


@pytest.mark.spec("MACHINES-04")
@pytest.mark.parametrize("case", [case for case in CASES if not case.transport], ids=str)
def test_link_carries_calculated_bytes(case: Case, results: Results) -> None:
    calculated = PER_MACHINE * sum(sent.between for sent in sent_by_link(case.job(), PER_MACHINE).values())
    for measured in results[case][1].sent:
        assert calculated < measured < OVERHEAD * calculated


@pytest.mark.spec("MACHINES-05")
def test_gloo_sends_around_a_ring_and_reduces_with_twice_the_bytes(results: Results) -> None:
    case = Case("wrapper", "FULL_SHARD", "collectives")
    sent = sent_by_link(case.job(), PER_MACHINE)
    calculated = PER_MACHINE * (sent["AG"].between + 2 * sent["RS"].between)
    for measured in results[case][1].sent:
        assert calculated < measured < OVERHEAD * calculated


@pytest.mark.spec("MACHINES-06")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_is_faster_than_the_link(case: Case, results: Results) -> None:
    two = results[case][1]
    assert len(two.seconds) > 1
    # The bytes of all steps are equal up to the overhead.
    assert min(two.seconds) >= 8 * max(two.sent) / OVERHEAD / RATE


@pytest.mark.pure
@pytest.mark.spec("MACHINES-05")
def test_direct_messages_that_leave_a_machine_with_more_ranks() -> None:
    full, hybrid = Case("wrapper", "FULL_SHARD").job(), Case("wrapper", "HYBRID_SHARD").job()
    # Eight ranks on two machines: each rank sends to 4 of 7 others directly, and 2 of 8 hops of a ring leave a machine.
    for by_messages, leaving in ((True, 4 / 7), (False, 2 / 8)):
        sent = sent_by_link(replace(full, num_shards=8, by_messages=by_messages), 4)
        for one in (sent["AG"], sent["RS"]):
            assert one.between == pytest.approx(leaving * (one.between + one.within))
        # Copies on each machine: only the rings of all-reduces leave it.
        sent = sent_by_link(replace(hybrid, num_shards=4, num_replicas=2, by_messages=by_messages), 4)
        assert sent["AG"].between == sent["RS"].between == sent["AR"].within == 0
        assert sent["AR"].between > 0
