"""One scenario as plain data: a training run of ``spec_tests/properties``, and other actions that can cause races.

The run has a model, a strategy, precision, accumulation, checkpointing, evaluation, and interrupting errors. It is
compared with a single process in that folder, so it only contains what a single process can do. Here, the checks are
the race checker and the replay in other orders, without a reference model. So a scenario can also unshard and reshard
manually, replace ``p.data``, set any switch of `FSDPModule`, or run the optimizer inside backward.

As JSON without default values, a scenario fits on one line::

    {"run":{"model":{"kind":"chain","children":[{"unit":true}]},"offload":true},"pins":true,"optimizer":"in_backward"}

`legal` replaces values that a front end does not support by the nearest supported ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from spec_tests.properties import description as runs
from spec_tests.properties.description import Description
from spec_tests.properties.draw import HYBRID, PLAIN, collected, descriptions, often, seldom
from spec_tests.properties.hunt import neighbours as simpler_runs

__all__ = ["SHAPES", "Scenario", "drawn", "from_json", "legal", "simpler", "to_json"]

# By name: number of ranks, and of replicas.
SHAPES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2)}

SWITCHES = ("keep_after_backward", "keep_after_forward", "free_after_forward", "divide", "unused", "no_gather")
BY_HAND = ("unshard", "async", "async_and_wait", "all", "in_vain", "between")
EDITS = ("in_place", "data", "write", "read", "read_on_cpu", "gradients")


@dataclass(frozen=True)
class Scenario:
    """A training run on the simulated device, as one rank; the other ranks are fake ranks.

    Attributes:
        run: the training run.
        rank: the rank of this process.
        batches: location of the batches: ``"device"``, or CPU memory, ``"plain"`` or ``"pinned"``, which the user
            overwrites as soon as forward has returned.
        reads: the CPU reads each loss.
        apart: each forward of a micro-batch has a backward of its own, after all forwards.
        optimizer: ``"sgd"``, ``"adam"``, ``"in_backward"``; or ``"event"``, which sets the event that the next
            iteration waits for (`set_post_optim_event`).
        scales: a gradient scaler is used.
        hook: the user's communication hook: ``"plain"``, ``"async"``, ``"low"``, or none.
        edits: the action between steps, one of `EDITS` or none.
        state: the kind of state dict that is taken after each step: ``"full"`` or ``"sharded"``.
        elsewhere: the current device of the process is not the device of the model.
        pins: offloaded shards are pinned (``fully_shard``).
        among: if not 0, the value of ``reshard_after_forward`` (``fully_shard``).
        ahead: number of neighbors that every unit prefetches in forward and in backward (``fully_shard``).
        by_hand: a manual unshard or reshard, one of `BY_HAND` or none (``fully_shard``).
        switches: some of `SWITCHES` (``fully_shard``).
        late: the switches are set after the first step.
        sums_late: unsynchronized micro-batches are reduced, but not over the replicas (``fully_shard``).
        goes_on: their backwards are marked as not the last of the iteration (``fully_shard``).
        resets: after an error, the iteration is reset manually (``fully_shard``).
    """

    run: Description = dataclasses.field(default_factory=Description)
    rank: int = 0
    batches: str = "device"
    reads: bool = False
    apart: bool = False
    optimizer: str = "sgd"
    scales: bool = False
    hook: str = ""
    edits: str = ""
    state: str = ""
    elsewhere: bool = False
    pins: bool = False
    among: int = 0
    ahead: int = 0
    by_hand: str = ""
    switches: tuple[str, ...] = ()
    late: bool = False
    sums_late: bool = False
    goes_on: bool = False
    resets: bool = False


# --- JSON ---


def to_json(scenario: Scenario) -> str:
    """The scenario as one line, without default values."""
    blank = Scenario()
    changed = {f.name: getattr(scenario, f.name) for f in dataclasses.fields(Scenario) if f.name != "run"}
    changed = {name: value for name, value in changed.items() if value != getattr(blank, name)}
    return json.dumps({"run": json.loads(runs.to_json(scenario.run)), **changed}, separators=(",", ":"))


def from_json(text: str) -> Scenario:
    """The scenario from the output of `to_json`."""
    fields = json.loads(text)
    run = runs.from_json(json.dumps(fields.pop("run", {})))
    return Scenario(run, **{name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()})


# --- legal scenarios ---


def legal(s: Scenario) -> Scenario:
    """The scenario itself, or the nearest one that is meaningful."""
    d = runs.legal(replace(s.run, model=_without_questions(s.run.model)))
    changes: dict[str, Any] = {"run": d, "rank": min(s.rank, d.num_ranks - 1)}
    if "fully_shard" in d.api:
        changes.update(_legal_for_each_parameter(s, d))
    else:
        changes.update(pins=False, among=0, ahead=0, by_hand="", switches=(), sums_late=False, goes_on=False)
        changes["resets"] = False
        if d.is_hybrid:
            changes["hook"] = ""
        if s.edits in ("data", "gradients") and not d.originals:
            changes["edits"] = "write"
    if s.optimizer == "in_backward":
        # Unsynchronized gradients must not be used for a step, and neither must gradients of an interrupted backward.
        changes.update(scales=False)
        changes["run"] = d = replace(d, micro_batches=(True,) * len(d.micro_batches), bomb="", clips=False)
        if not d.originals:
            changes["optimizer"] = "sgd"
    if not d.bomb:
        changes["resets"] = False
    return replace(s, **changes)


def _without_questions(node: runs.Node) -> runs.Node:
    """Without modules that read the batch on the CPU, which would stop the CPU and order everything in each forward."""
    kind = "own" if node.kind == "one_sided" else node.kind
    return replace(node, kind=kind, children=tuple(map(_without_questions, node.children)))


def _legal_for_each_parameter(s: Scenario, d: Description) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    size = d.num_ranks // d.num_replicas
    if s.among and size % s.among:
        changes["among"] = 0
    if not d.offload:
        changes["pins"] = False
    elif s.scales:
        # Torch's scaler all-reduces on the device of the gradients, and NCCL does not support CPU tensors.
        changes["scales"] = False
    if s.edits == "gradients":
        changes["edits"] = "read"
    if all(d.micro_batches):
        changes.update(sums_late=False, goes_on=False)
    if not d.is_hybrid or any(node.checkpoint == "reentrant" for node, _ in runs.walk(d.model)):
        # A nested backward reduces on its own, and partial sums would belong to other parameters: this is an error.
        changes["sums_late"] = False
    if not s.switches:
        changes["late"] = False
    return changes


# --- random scenarios ---


@st.composite
def _scenarios(draw: st.DrawFn, shape: str, api: str) -> Scenario:
    num_ranks, num_replicas = SHAPES[shape]
    run = draw(descriptions(num_ranks, api))
    strategies = HYBRID if num_replicas > 1 else (*PLAIN, *PLAIN, *HYBRID)
    copies = num_replicas if num_replicas > 1 else draw(st.sampled_from([1, num_ranks]))
    run = replace(run, strategy=draw(st.sampled_from(strategies)), num_replicas=copies, edits=False, saves=False)
    run = replace(run, offload=draw(st.sampled_from([False, False, True])), steps=2)
    drawn = Scenario(
        run,
        rank=draw(st.sampled_from([0, 0, num_ranks - 1])),
        batches=draw(st.sampled_from(["device", "device", "plain", "pinned"])),
        reads=draw(seldom),
        apart=draw(seldom),
        optimizer=draw(st.sampled_from(["sgd", "sgd", "adam", "event", "in_backward"])),
        scales=draw(seldom),
        hook=draw(st.sampled_from(["", "", "", "plain", "async", "low"])),
        edits=draw(st.sampled_from(["", "", "", *EDITS])),
        state=draw(st.sampled_from(["", "", "", "full", "sharded"])),
        elsewhere=draw(seldom),
        pins=draw(often),
        among=draw(st.sampled_from([0, 0, 0, 1, 2])),
        ahead=draw(st.sampled_from([0, 0, 1, 2])),
        by_hand=draw(st.sampled_from(["", "", *BY_HAND])),
        switches=tuple(sorted(draw(st.sets(st.sampled_from(SWITCHES), max_size=2)))),
        late=draw(st.booleans()),
        sums_late=draw(often),
        goes_on=draw(st.booleans()),
        resets=draw(st.booleans()),
    )
    return legal(drawn)


def drawn(num: int, number: int, shape: str, api: str) -> list[Scenario]:
    """``num`` scenarios, the same for the same seed ``number``."""
    return collected(_scenarios(shape, api), num, number)


# --- simpler scenarios ---


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """All legal scenarios that are simpler by one step, the largest simplifications first."""
    for run in simpler_runs(scenario.run):
        yield from _if_smaller(scenario, replace(scenario, run=run))
    blank = Scenario()
    for field in dataclasses.fields(Scenario):
        if field.name != "run" and getattr(scenario, field.name) != getattr(blank, field.name):
            yield from _if_smaller(scenario, replace(scenario, **{field.name: getattr(blank, field.name)}))


def _if_smaller(scenario: Scenario, candidate: Scenario) -> Iterator[Scenario]:
    candidate = legal(candidate)
    if len(to_json(candidate)) < len(to_json(scenario)):
        yield candidate
