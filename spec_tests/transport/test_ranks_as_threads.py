"""Ranks that are threads of one process, as in torch's ``MultiThreadedTestCase``.

State of the package belongs to a process group, so a rank that ends its group does not affect the ranks that are late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg

from minifsdp.checks import rank_checks
from minifsdp.checks.collective_log import log
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import fully_shard

pytestmark = [
    pytest.mark.pure,
    pytest.mark.cpu,
    pytest.mark.skipif(
        not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"),
        reason="destroy_process_group of this torch raises an error for ranks that are threads",
    ),
]


def run_in_threads(body: Callable[[int], None]) -> list[str]:
    """Runs ``body`` on two ranks that are threads. Returns their errors."""
    errors: list[str] = []
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        try:
            body(rank)
        except BaseException as error:
            errors.append(f"rank {rank}: {type(error).__name__}: {error}")
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return errors


def shard(api: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if api == "fully_shard":
        for module in (*model, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
        return model
    for index in range(2):
        model[index] = FSDP(model[index], device_id=torch.device("cpu"))
    return FSDP(model, device_id=torch.device("cpu"))


@pytest.mark.spec("LEDGER-19", "HEALTHY-06")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_a_rank_that_ends_its_group_does_not_affect_a_rank_that_is_late(
    api: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left, ask, losses = threading.Event(), rank_checks.ask, dict[int, list[float]]()

    def late_ask(group: Any, *tensors: torch.Tensor) -> Any:
        asked = ask(group, *tensors)
        if group.rank != first and len(losses.get(group.rank, [])) == 3:
            # The other rank has got all values that it needs from this one, and destroys its group.
            assert has_left.wait(30)
        return asked

    def body(rank: int) -> None:
        model = shard(api)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            losses.setdefault(rank, []).append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == first:
            dist.destroy_process_group()
            has_left.set()

    monkeypatch.setattr(rank_checks, "ask", late_ask)
    assert run_in_threads(body) == []
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


@pytest.mark.spec("AGREE-09", "LEDGER-19")
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_only_the_rank_that_has_ended_its_group_can_no_longer_communicate(api: str) -> None:
    has_left, may_end, texts = threading.Event(), threading.Barrier(2), list[str]()

    def body(rank: int) -> None:
        model = shard(api)
        model(torch.ones(2, 4)).sum().backward()
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
            with pytest.raises(RuntimeError, match="process group of this model was destroyed") as caught:
                model(torch.ones(2, 4))
            texts.append(str(caught.value))
            has_left.set()
        else:
            assert has_left.wait(30)
            assert any(sequence.store() is not None for sequence in log.sequences.values())
        may_end.wait(30)

    assert run_in_threads(body) == []
    assert len(texts) == 1
