"""A small training on two or four ranks. In the third iteration one rank, usually rank 1, does something else.

    python -m spec_tools.processes.deviate API WHAT
    python -m spec_tools.processes.deviate FOLDER "starts again"

The groups' time-out is minutes, so a rank that waits for it exceeds the test's limit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.checks.collective_log import log
from minifsdp.engine.events import events
from minifsdp.watchdog.watchdog import PATIENCE
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType, fully_shard
from spec_tools.processes.faults import commit
from spec_tools.processes.ranks import end_as_python_does

TIMEOUT = timedelta(minutes=5)


class Pair(nn.Module):
    """Two layers, which run in the given order."""

    def __init__(self, are_equal: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=are_equal)

    def forward(self, x: Tensor, order: str = "ab") -> Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


def sharded(api: str, keeps: bool, are_equal: bool) -> Any:
    """Shards the model; four ranks use a mesh of 2 x 2."""
    torch.manual_seed(0)
    model: Any = Pair(are_equal)
    mesh = dist.init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    if api == "function":
        for part in (model.a, model.b, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=not keeps)
        return model
    # Also on a machine with GPUs, where a model on the CPU would be sharded on one.
    options: dict[str, Any] = {"device_mesh": mesh, "device_id": torch.device("cpu")}
    names = ("FULL_SHARD", "SHARD_GRAD_OP") if mesh is None else ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    options["sharding_strategy"] = ShardingStrategy[names[keeps]]
    model.a, model.b = FSDP(model.a, **options), FSDP(model.b, **options)
    return FSDP(model, **options)


def micro_batch(model: Any, api: str, syncs: bool, order: str) -> None:
    x = torch.ones(2, 8)
    if api == "function":
        model.set_requires_gradient_sync(syncs)
    elif not syncs:
        with model.no_sync():
            model(x, order).sum().backward()
        return
    model(x, order).sum().backward()


# ---- what a rank does before its step ----


def end(model: Any) -> None:
    commit("exits")


def be_killed(model: Any) -> None:
    commit("is killed")


def ask_for_state_dict(model: Any) -> None:
    """No connection of gloo breaks if a rank is missing: ranks first synchronize through the store."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()


def read_tensor(model: Any) -> None:
    model.a.weight.full_tensor()


def wait_for_device(model: Any) -> None:
    """An event of an accelerator that never completes, while the CPU continues."""
    events.last_event = SimpleNamespace(query=lambda: False)
    while not log.fatal_error:
        time.sleep(0.1)


def catch(model: Any, order: str) -> None:
    """The second layer is new on both ranks, so both check with the other rank first."""
    try:
        model(torch.ones(2, 8), order).sum().backward()
    except RuntimeError as error:
        print(error)
    # Longer than the watchdog waits before it queries the other ranks.
    time.sleep(2 * PATIENCE)
    model.zero_grad()


# By the deviation: what the deviating rank does, and what the other ranks do.
Action = Callable[[Any], None]
NOTHING: Action = lambda model: None  # noqa: E731
BEFORE_STEP: dict[str, tuple[Action, Action]] = {
    "is the host and ends": (end, NOTHING),
    "is the host and killed": (be_killed, NOTHING),
    "asks for a state dict": (ask_for_state_dict, NOTHING),
    "is killed before a state dict": (be_killed, ask_for_state_dict),
    "reads a DTensor": (be_killed, read_tensor),
    "has a stuck device": (end, wait_for_device),
    "catches that it swaps layers of other sizes": (lambda model: catch(model, "ba"), lambda model: catch(model, "bb")),
}
# The layers that the deviating rank runs.
ORDERS = {"leaves out": "b", "swaps layers": "ba"}


def start_again(folder: str) -> None:
    """The ranks fail, catch the error, and start again with other process groups."""
    rank, x = int(os.environ["RANK"]), torch.ones(2, 8)
    for start in range(2):
        store = f"file://{folder}/store-{start}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=TIMEOUT)
        model = sharded("function", keeps=False, are_equal=True)
        for _ in range(2):
            model(x).sum().backward()
        watchdog = log.watchdog
        try:
            # One rank skips a unit, so each rank waits for a collective that the other does not issue.
            model(x, "b" if rank else "ab").sum().backward()
        except RuntimeError:
            print("caught", bool(log.fatal_error), flush=True)
        dist.destroy_process_group()
        print("the watchdog has ended:", watchdog._has_ended.is_set(), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[2] == "starts again":
        start_again(sys.argv[1])
        return
    # A fork of a process that has imported torch has not read this variable.
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    api, what = sys.argv[1:]
    model = sharded(api, keeps=what == "keeps and no_sync", are_equal="of other sizes" not in what)
    of_one, of_others = BEFORE_STEP.get(what, (NOTHING, NOTHING))
    # Late enough that all collectives have been issued before.
    last = 11 if what.endswith("late") else 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(last + 1):
        deviates = step == last - 1 and dist.get_rank() == (0 if "host" in what else 1)
        if step == last - 1:
            (of_one if deviates else of_others)(model)
        for number in range(2):
            no_sync = "no_sync" in what and deviates and number == 0
            order = ORDERS.get(what.partition(" of ")[0], "ab") if deviates else "ab"
            micro_batch(model, api, not no_sync, order)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.1)


if __name__ == "__main__":
    end_as_python_does(main)
