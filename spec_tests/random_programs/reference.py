"""The reference: the same program in one process, with all ranks' batches and one plain model.

`SingleProcess` keeps the gradients of each rank. This class keeps the other state of each rank: which losses wait for
their backward, and whether the rank reduces. Where ranks would reduce in a backward, it computes the mean::

    backward on both, all reduce      p.grad += (waiting of rank 0 + waiting of rank 1) / 2
    rank 0 in no_sync, rank 1 not     two ranks cannot do that: `discord`

Its methods have the names of the calls. Each returns the expected result of the sharded model on this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spec_tests.oracles.gathering import clean_name
from spec_tests.oracles.single import SingleProcess, copy_all
from spec_tests.random_programs.description import Call, Description
from spec_tests.random_programs.front_ends import PRECISIONS
from spec_tests.random_programs.modules import (
    Kept,
    batch,
    loss_of,
    optimizer_for,
    output_of,
    part_of,
    plain_model,
    prepared,
    units_of,
)

DTYPES = {"double": torch.float64, "float": torch.float32}
# The edits that change nothing.
READS = ("read", "read_on_cpu", "gradients")


def chosen(pending: list[Any], which: str) -> list[Any]:
    """Removes and returns the first, the last or all of the pending losses."""
    if which == "all":
        taken, pending[:] = list(pending), []
        return taken
    return [pending.pop(0 if which == "first" else -1)] if pending else []


def to_be_loaded(saved: list[Any], call: Call) -> Any:
    """The saved state that a call loads. The index wraps around, because shrinking can remove an earlier save."""
    return saved[call["index"] % len(saved)]


class Reference:
    """One plain model.

    Args:
        d: the program.
        rank: the rank whose results are returned.

    Attributes:
        calling: the ranks that make the next call.
        model: the plain model.
        units: node and parameter names of each unit.
        kept: the kept gradients of each forward of this rank.
        discord: the ranks cannot have issued the same collectives in some backward.
        is_shifted: with NO_SHARD, only one rank reduced in a backward. NO_SHARD has no other collective, not even for
            clipping, so the other rank can reach the same backward later, with gradients that it has changed by then.
    """

    def __init__(self, d: Description, rank: int) -> None:
        self.d, self.rank, self.ranks = d, rank, range(d.num_ranks)
        self.calling: Iterable[int] = self.ranks
        self.model = plain_model(d)
        self.units = units_of(self.model)
        self.single = self._simulation()
        self.optimizer = optimizer_for(d, self.model)
        self.pending: list[list[Tensor]] = [[] for _ in self.ranks]
        self.kept: list[Kept] = []
        self.dtype: torch.dtype | None = None
        self.used: Tensor | None = None
        self.saved: list[dict[str, Any]] = []
        self.saved_optimizer: list[dict[str, Any]] = []
        self.discord = self.is_shifted = False
        self._contexts: list[list[Any]] = [[] for _ in self.ranks]
        self.reduces = [dict.fromkeys(self.units, True) for _ in self.ranks]

    def _simulation(self) -> SingleProcess:
        precision = {} if self.d.precision == "single" else PRECISIONS[self.d.precision]
        names = {unit: [clean_name(name) for name in names] for unit, (_, names) in self.units.items()}
        return SingleProcess(
            self.model, self.d.num_ranks, names, precision.get("param_dtype"), precision.get("reduce_dtype")
        )

    @property
    def waiting_units(self) -> set[str]:
        """Units with gradients that wait for a reduction."""
        return {self.single.unit_of[name] for of_rank in self.single.waiting for name in of_rank}

    # --- training ---

    def begin_step(self, call: Call) -> None:
        self.model.clock.step = call["step"]

    def forward(self, call: Call) -> Tensor | None:
        return self._each(call, keeps=True)

    def evaluate(self, call: Call) -> Tensor | None:
        with torch.set_grad_enabled(call.get("is_recorded", False)):
            return self._each(call, keeps=False)

    def _each(self, call: Call, *, keeps: bool) -> Tensor | None:
        mine = None
        # This rank is first, because an error ends the loop.
        ranks = sorted(self.calling, key=lambda rank: rank != self.rank)
        for rank in ranks if keeps else {self.rank} & {*ranks}:
            kept = Kept() if keeps and self.d.tracks_input else None
            inputs = prepared(batch(self.d, call["batch"], rank), self._input_dtype(), kept)
            with self.single.as_rank(rank) as model, self.model.clock.of_call(call, rank, kept):
                node, called = part_of(self.d.model, model, call.get("part"))
                output = output_of(node, called, inputs)
            if keeps:
                self.pending[rank].append(loss_of([output]))
            if rank == self.rank:
                mine = output
                if kept is not None:
                    self.kept.append(kept)
        return mine

    def _input_dtype(self) -> torch.dtype | None:
        return self.single.compute_dtype or self.dtype

    def generate(self, call: Call) -> Tensor | None:
        if self.rank not in self.calling:
            return None
        with self.single.as_rank(self.rank) as model:
            inputs = prepared(batch(self.d, call["batch"], self.rank), self._input_dtype(), None)
            return output_of(self.d.model, model.generate, inputs)

    def strange_input(self, call: Call) -> Any:
        return self.model(call["input"])

    def backward(self, call: Call) -> None:
        reducing: list[set[str]] = [set() for _ in self.ranks]
        computing = [rank for rank in self.calling if self.pending[rank]]
        for rank in computing:
            total = torch.stack(chosen(self.pending[rank], call["which"])).sum()
            if rank == self.rank:
                self.used = total
            before, self.single.waiting[rank] = self.single.waiting[rank], {}
            with self.single.as_rank(rank):
                if total.requires_grad:
                    total.backward()
            for name, gradient in self.single.waiting[rank].items():
                before[name] = before[name] + gradient if name in before else gradient
            units = {self.single.unit_of[name] for name in self.single.waiting[rank]}
            self.single.waiting[rank] = before
            if self.d.is_per_parameter:
                # A reducing backward also reduces waiting gradients of units that it has not reached.
                units = {self.single.unit_of[name] for name in before}
            reducing[rank] = {unit for unit in units if self.reduces[rank][unit]}
        if any(units != reducing[0] for units in reducing):
            may_come_later = self.d.strategy == "NO_SHARD" and not all(reducing)
            self.is_shifted |= may_come_later
            self.discord |= not may_come_later
        self._reduce(set().union(*reducing))

    def _reduce(self, units: set[str]) -> None:
        self.single.reduce(units, factor=0.5 if self.d.hook == "communication" else 1.0)
        if self.d.hook == "accumulated":
            for name, parameter in self.single.parameters.items():
                if self.single.unit_of[name] in units and parameter.grad is not None:
                    parameter.grad = parameter.grad / 2
        if not self.d.is_per_parameter:
            self.single.fill_up()

    def backward_again(self, call: Call) -> None:
        if self.used is not None:
            self.used.backward()

    def step(self, call: Call) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.changed()

    def zero_grad(self, call: Call) -> None:
        self.model.zero_grad(set_to_none=call["to_none"])
        if not self.d.is_per_parameter or call["of_model"]:
            # The wrapper has unreduced gradients in `.grad`, where an optimizer finds them too.
            for of_rank in self.single.waiting:
                for name in list(of_rank):
                    of_rank[name] = torch.zeros_like(of_rank[name])
                if call["to_none"]:
                    of_rank.clear()

    def clip(self, call: Call) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), call["most"], float(call["norm"]))

    @torch.no_grad()
    def edit(self, call: Call) -> None:
        if call.get("how") not in READS:
            for parameter in self.model.parameters():
                parameter.mul_(0.5)
            self.changed()

    apply = edit

    def new_optimizer(self, call: Call) -> None:
        self.optimizer = optimizer_for(self.d, self.model)

    def convert(self, call: Call) -> None:
        if self.waiting_units:
            return
        self.dtype = DTYPES[call["dtype"]]
        getattr(self.model, call["dtype"])()
        for buffers in self.single.buffers:
            buffers[:] = [buffer.to(self.dtype) for buffer in buffers]
        self.model.zero_grad()
        self.new_optimizer(call)
        self.changed()

    def mode(self, call: Call) -> None:
        self.model.train(call["train"])
        if self.d.full_in_eval:
            self.changed()

    def changed(self) -> None:
        """The parameters have changed: drops losses that were computed from the old ones."""
        # Autograd may or may not refuse a backward through a graph that was computed from other values (FWD-05).
        self.single.is_stale = True
        for of_rank in self.pending:
            of_rank.clear()
        self.used = None

    # --- saving ---

    def save(self, call: Call) -> None:
        copy_all(self.single.buffers[self.rank], self.model.buffers())
        self.saved.append({key: value.clone() for key, value in self.model.state_dict().items()})

    def load(self, call: Call) -> None:
        if self.saved:
            self.model.load_state_dict(to_be_loaded(self.saved, call), strict=call["strict"])
            copy_all(self.model.buffers(), self.single.buffers[self.rank])
            self.changed()

    def save_optimizer(self, call: Call) -> None:
        if self.optimizer is not None and self.optimizer.state:
            self.saved_optimizer.append(copy.deepcopy(self.optimizer.state_dict()))

    def load_optimizer(self, call: Call) -> None:
        if self.saved_optimizer and self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(to_be_loaded(self.saved_optimizer, call)))

    # --- switches ---

    def sync(self, call: Call) -> None:
        for rank in self.calling:
            for unit in self._below(call):
                self.reduces[rank][unit] = call["value"]

    def _below(self, call: Call) -> list[str]:
        """The units that a call with ``part`` and ``recurse`` applies to."""
        part = call.get("part")
        own = "" if part is None else f"parts.{part}"
        return [
            unit
            for unit in self.units
            if unit == own or (call.get("recurse", True) and (not own or unit.startswith(own + ".")))
        ]

    def enter(self, call: Call) -> None:
        for rank in self.calling:
            before = self.reduces[rank] if call["what"] == "no_sync" else None
            self._contexts[rank].append(before)
            if before is not None:
                self.reduces[rank] = dict.fromkeys(self.units, False)

    def leave(self, call: Call) -> None:
        for rank in self.calling:
            before = self._contexts[rank].pop() if self._contexts[rank] else None
            if before is not None:
                self.reduces[rank] = before

    def nothing(self, call: Call) -> None:
        """Most switches change when memory is used, and never the results."""

    unshard = wait = reshard = keep = keep_after_backward = prefetch = wrong = copy = nothing
    break_off = unshard_by_hand = read_gradients = nothing
