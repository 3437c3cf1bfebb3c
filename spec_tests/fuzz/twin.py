"""The reference model: the same program in one process, with both ranks' batches and one plain model.

It keeps the state of each rank separately: which losses wait for their backward, which gradients wait for their
reduction, and whether a rank reduces. Where ranks would reduce in a backward, it computes the mean::

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

from spec_tests.fuzz import net as nets
from spec_tests.fuzz.case import Call, to_be_loaded

__all__ = ["Twin", "chosen", "damaged"]

RANKS = (0, 1)


def chosen(pending: list[Any], which: str) -> list[Any]:
    """Removes and returns the first, the last or all of the pending losses."""
    if which == "all":
        taken, pending[:] = list(pending), []
        return taken
    return [pending.pop(0 if which == "first" else -1)] if pending else []


def damaged(state: dict[str, Any], damage: str | None) -> Any:
    """A state dict with an error in it; the same dict if ``damage`` is ``None``."""
    state = dict(state)
    victim = next((key for key in state if key != "seen"), "none")
    changes: dict[str, Any] = {"shape": torch.zeros(1, 2, 3, dtype=torch.float64), "type": 3, "none": None}
    if damage == "missing":
        state.pop(victim, None)
    elif damage == "extra":
        state["no.such.parameter"] = torch.zeros(2)
    elif damage == "list":
        return list(state)
    elif damage in changes:
        state[victim] = changes[damage]
    return state


class Twin:
    """One plain model.

    Args:
        options: of the case.
        rank: the rank whose results are returned.

    Attributes:
        discord: the ranks cannot have issued the same collectives in some backward.
        is_shifted: with NO_SHARD, only one rank reduced in a backward. NO_SHARD has no other collective, not even for
            clipping, so the other rank can reach the same backward later, with gradients that it has changed by then.
    """

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        self.options, self.rank = options, rank
        self.net = nets.made(options)
        self.optimizer = nets.optimizer_over(self.net.parameters(), options)
        self.pending: list[list[Tensor]] = [[] for _ in RANKS]
        self.kept: list[nets.Kept] = []
        self.inputs: list[list[Tensor]] = [[] for _ in RANKS]
        self.dtype = options.get("begins", "double")
        self.used: Tensor | None = None
        self.saved: list[dict[str, Any]] = []
        self.saved_optimizer: list[dict[str, Any]] = []
        self.discord = self.is_shifted = False
        self._contexts: list[list[Any]] = [[] for _ in RANKS]
        paths = [name for name, module in self.net.named_modules() if isinstance(module, nets.Block)]
        self.unit_of = {
            name: max((path for path in paths if name.startswith(path + ".")), key=len, default="")
            for name, _ in self.net.named_parameters()
        }
        self.units = list(dict.fromkeys(self.unit_of.values()))
        self.reduces = [dict.fromkeys(self.units, True) for _ in RANKS]
        self.waiting: list[dict[str, Tensor]] = [{} for _ in RANKS]

    @property
    def waiting_units(self) -> set[str]:
        """Units with gradients that wait for a reduction."""
        return {self.unit_of[name] for of_rank in self.waiting for name in of_rank}

    # --- training ---

    def forward(self, call: Call, ranks: Iterable[int] = RANKS) -> Tensor | None:
        return self._each(call, ranks, keeps=True)

    @torch.no_grad()
    def evaluate(self, call: Call, ranks: Iterable[int] = RANKS) -> Tensor | None:
        return self._each(call, ranks, keeps=False)

    def _each(self, call: Call, ranks: Iterable[int], *, keeps: bool) -> Tensor | None:
        mine, seen = None, self.net.seen.clone()
        for rank in ranks:
            before = seen.clone()
            self.net.seen.copy_(before)
            kept = nets.Kept() if keeps else None
            called = self.net if call.get("part") is None else self.net.blocks[call["part"]]
            output = nets.output_of(self.net, called, {**call, "dtype": self.dtype}, rank, kept)
            if kept is not None:
                self.pending[rank].append(nets.loss_of(output))
                self.inputs[rank].append(kept.input)
                if rank == self.rank:
                    self.kept.append(kept)
            mine = output if rank == self.rank else mine
        if self.rank not in tuple(ranks):
            self.net.seen.copy_(seen)
        return mine

    def generate(self, call: Call, ranks: Iterable[int] = RANKS) -> Tensor | None:
        mine, seen = None, self.net.seen.clone()
        for rank in ranks:
            self.net.seen.copy_(seen)
            output = self.net.generate(nets.batch(call["batch"], rank).to(nets.DTYPES[self.dtype]))
            mine = output if rank == self.rank else mine
        return mine

    def strange_input(self, call: Call, ranks: Iterable[int] = RANKS) -> Any:
        return self.net(call["input"])

    def backward(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        names, parameters = zip(*self.net.named_parameters(), strict=True)
        reducing: list[set[str]] = [set(), set()]
        computing = [rank for rank in ranks if self.pending[rank]]
        for rank in computing:
            losses = chosen(self.pending[rank], call["which"])
            total = torch.stack(losses).sum()
            if rank == self.rank:
                self.used = total
            # The hooks of `Kept` are called only for tensors on the path to one of these.
            gradients = torch.autograd.grad(total, (*parameters, *self.inputs[rank]), allow_unused=True)
            for name, gradient in zip(names, gradients, strict=False):
                if gradient is not None:
                    held = self.waiting[rank].get(name)
                    self.waiting[rank][name] = gradient if held is None else held + gradient
                    if self.reduces[rank][self.unit_of[name]]:
                        reducing[rank].add(self.unit_of[name])
        if self.options["api"] == "composed":
            # With `fully_shard`, a reducing backward also reduces waiting gradients of units that it has not reached.
            for rank in computing:
                reducing[rank] |= {self.unit_of[n] for n in self.waiting[rank] if self.reduces[rank][self.unit_of[n]]}
        if reducing[0] != reducing[1]:
            may_come_later = self.options.get("strategy") == "NO_SHARD" and not all(reducing)
            self.is_shifted |= may_come_later
            self.discord |= not may_come_later
        self._reduce(reducing[0] | reducing[1])

    def _reduce(self, units: set[str]) -> None:
        for name, parameter in self.net.named_parameters():
            if self.unit_of[name] in units:
                there = [of_rank.pop(name) for of_rank in self.waiting if name in of_rank]
                # `broken` omits the division, for a test of these tests.
                mean = torch.stack(there).sum(0) / (1 if self.options.get("broken") else 2)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def backward_again(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if self.used is not None:
            self.used.backward()

    def step(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        self.optimizer.step()
        self._changed()

    def zero_grad(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        self.net.zero_grad(set_to_none=call["to_none"])
        if self.options["api"] == "wrapped" or call["of_model"]:
            # The wrapper has unreduced gradients in `.grad`, where an optimizer finds them too.
            for of_rank in self.waiting:
                for name in list(of_rank):
                    of_rank[name] = torch.zeros_like(of_rank[name])
                if call["to_none"]:
                    of_rank.clear()

    def clip(self, call: Call, ranks: Iterable[int] = RANKS) -> Tensor:
        return nn.utils.clip_grad_norm_(self.net.parameters(), call["most"], float(call["norm"]))

    def edit(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.mul_(0.5)
        self._changed()

    apply = edit

    def new_optimizer(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        self.optimizer = nets.optimizer_over(self.net.parameters(), self.options)

    def convert(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if self.waiting_units:
            return
        self.dtype = call["dtype"]
        getattr(self.net, self.dtype)()
        self.net.zero_grad()
        self.new_optimizer(call)
        self._changed()

    def mode(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        self.net.train(call["train"])
        if self.options.get("full_in_eval"):
            self._changed()

    def _changed(self) -> None:
        # Autograd may or may not refuse a backward through a graph that was computed from other values (FWD-05).
        for of_rank in self.pending:
            of_rank.clear()
        for inputs in self.inputs:
            inputs.clear()
        self.used = None

    # --- saving ---

    def save(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        self.saved.append({key: value.clone() for key, value in self.net.state_dict().items()})

    def load(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if self.saved:
            state = damaged(to_be_loaded(self.saved, call), call.get("damage"))
            self.net.load_state_dict(state, strict=call.get("strict", True))
            self._changed()

    def save_optimizer(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if self.optimizer.state:
            self.saved_optimizer.append(copy.deepcopy(self.optimizer.state_dict()))

    def load_optimizer(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if self.saved_optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(to_be_loaded(self.saved_optimizer, call)))

    # --- switches ---

    def sync(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        for rank in ranks:
            for unit in self.below(call):
                self.reduces[rank][unit] = call["value"]

    def below(self, call: Call) -> list[str]:
        """The units that a call with ``part`` and ``recurse`` applies to."""
        part = call.get("part")
        own = "" if part is None else f"blocks.{part}"
        return [
            unit
            for unit in self.units
            if unit == own or (call.get("recurse", True) and (not own or unit.startswith(own + ".")))
        ]

    def enter(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        if call["what"] == "no_sync":
            for rank in ranks:
                before, self.reduces[rank] = self.reduces[rank], dict.fromkeys(self.units, False)
                self._contexts[rank].append(before)
        else:
            for rank in ranks:
                self._contexts[rank].append(None)

    def leave(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        for rank in ranks:
            before = self._contexts[rank].pop() if self._contexts[rank] else None
            if before is not None:
                self.reduces[rank] = before

    def nothing(self, call: Call, ranks: Iterable[int] = RANKS) -> None:
        """Most switches change when memory is used, and never the results."""

    unshard = wait = reshard = keep = keep_after_backward = prefetch = wrong = nothing
