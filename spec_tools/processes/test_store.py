"""The start and the end of ranks that depend on the store: after restarts, and if rank 0 hosts the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from minifsdp.watchdog import process
from spec_tests.ports import free_port

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


@pytest.mark.pure
@pytest.mark.spec("MACHINES-11")
@pytest.mark.parametrize(("of_torchrun", "is_host"), [("True", False), ("False", True), (None, True)])
def test_rank_0_hosts_the_store_unless_torchrun_does(
    of_torchrun: str | None, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, created = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False), []
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(process, "Watchdog", lambda *arguments: created.append(arguments))
    monkeypatch.setattr(process.log, "store", None)
    monkeypatch.setattr(process.log, "watchdog", None)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if of_torchrun:
        # With a static rendezvous, it sets "False".
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", of_torchrun)
    process.start()
    process.atexit.unregister(process.at_exit)
    assert [arguments[1] for arguments in created] == [is_host]
