"""The start and the end of ranks that depend on the store: after restarts, and if rank 0 hosts the store."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from spec_tests.ports import free_port
from spec_tools.processes import launch

LIMIT = 60.0
TUTORIALS = str(Path(__file__).resolve().parents[2] / "tutorials")


@pytest.mark.pure
@pytest.mark.spec("MACHINES-10")
def test_ranks_share_a_new_part_of_the_store_after_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TUTORIALS)
    from gpt.ranks import store_of_this_start

    port, limit = free_port(), timedelta(seconds=LIMIT)
    host = TCPStore("127.0.0.1", port, is_master=True, timeout=limit)

    def start(rank: int) -> dist.Store:
        return store_of_this_start(TCPStore("127.0.0.1", port, is_master=False, timeout=limit), rank, 3)

    with ThreadPoolExecutor(3) as ranks:
        for number in range(3):
            stores = list(ranks.map(start, [2, 1, 0] if number else [0, 1, 2]))
            # Nothing that an earlier start has written is left.
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(number))
            assert [store.get("address") for store in stores] == [str(number).encode()] * 3
            # The request of a process that was killed before rank 0 has answered it.
            host.add("asked", 1)


# Rank 0 raises, and rank 1 waits for it.
RAISES = f"""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds={LIMIT / 2}))
model = fully_shard(torch.nn.Linear(4, 4))
dist.barrier()
if os.environ["RANK"] == "0":
    raise ValueError("a bad batch")
model(torch.ones(2, 4))
"""


@pytest.mark.spec("MACHINES-11")
def test_rank_0_waits_for_reports_if_it_hosts_the_store_under_torchrun(tmp_path: Path) -> None:
    # The last variable is what torchrun sets for a static rendezvous.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": False, "MINIFSDP_LEDGER_DIR": "off"}
    ranks = [launch.started([sys.executable, "-c", RAISES], str(tmp_path), **place, RANK=rank) for rank in range(2)]
    _, (status, _, errors) = map(launch.finished, ranks)
    assert status == 1
    assert "rank 0: has ended, by ValueError: a bad batch" in errors, errors
