"""The state machine of a unit, with a layout that only records its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.unit import State, Unit, UnitPolicy

CPU = torch.device("cpu")


class Log:
    """Replaces a layout, its handles and the limiter. It only records the calls."""

    offloads = False
    group: Any = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.dtype, self.num_bytes = torch.float32, 32

    # layout
    def all_gather(self, comm_streams: CommStreams) -> Any:
        self.calls.append("all_gather")
        return self

    def use_sharded_params(self) -> None:
        self.calls.append("use_sharded_params")

    def free(self) -> Any:
        self.calls.append("free")
        return "event"

    # handle
    def wait(self) -> None:
        self.calls.append("wait")

    # limiter
    def throttle(self, name: str) -> None:
        self.calls.append("throttle")

    def released(self, event: Any) -> None:
        assert event == "event"
        self.calls.append("released")


# state before, method, state after, and the calls of layout, handle and limiter in this order
TABLE = [
    (State.SHARDED, "unshard", State.GATHERING, ["throttle", "all_gather"]),
    (State.SHARDED, "wait", RuntimeError, []),
    (State.SHARDED, "reshard", State.SHARDED, []),
    (State.GATHERING, "unshard", State.GATHERING, []),
    (State.GATHERING, "wait", State.UNSHARDED, ["wait"]),
    (State.GATHERING, "reshard", State.SHARDED, ["wait", "use_sharded_params", "free", "released"]),
    (State.UNSHARDED, "unshard", State.UNSHARDED, []),
    (State.UNSHARDED, "wait", State.UNSHARDED, []),
    (State.UNSHARDED, "reshard", State.SHARDED, ["use_sharded_params", "free", "released"]),
]


@pytest.mark.pure
def test_each_unit_method_leads_to_state_in_table() -> None:
    for before, method, after, calls in TABLE:
        log: Any = Log()
        plan = ReducePlan.mean(MeshGroups(None, None), torch.float32)
        unit = Unit([nn.Linear(2, 2)], log, [plan], UnitPolicy(reshard_after_forward=True))
        root: Any = SimpleNamespace(comm_streams=CommStreams(CPU), limiter=log)
        root.iteration = SimpleNamespace(points=ExtensionPoints())
        unit.root, unit.name = root, "block"
        if before is not State.SHARDED:
            unit.unshard()
        if before is State.UNSHARDED:
            unit.wait()
        assert unit.state is before
        log.calls.clear()
        if after is RuntimeError:
            with pytest.raises(RuntimeError, match="'block' waits for an all-gather that was never issued"):
                getattr(unit, method)()
            after = before
        else:
            getattr(unit, method)()
        assert (unit.state, log.calls) == (after, calls), f"{method} of a unit that is {before.name}"
