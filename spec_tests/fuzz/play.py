"""Runs a program on a rank: makes each call on the sharded model and on the reference model, and records what is wrong.

A finding is one of these:

* *differs*: an output, a parameter, a gradient or a saved value is not equal to the reference model's;
* *bare error*: an error from minifsdp without its message format, which the reference model has not raised;
* *refused*: an error of minifsdp for a correct call;
* *lenient*: the reference model has raised an error, and the sharded model has not;
* *no end*: the ordinary step after all calls fails;
* *discord*: ranks have made different calls, and all reached the end.

Errors of minifsdp are expected if the order is wrong. They do not change the reference model.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import pathlib
import re
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.fuzz.case import Call, Case, from_json
from spec_tests.fuzz.composed import Composed
from spec_tests.fuzz.sides import Pieces, Side
from spec_tests.fuzz.twin import Twin
from spec_tests.fuzz.wrapped import Wrapped
from spec_tests.harness.checkout import is_of_package
from spec_tests.oracles.compare import DOUBLE, FLOAT, LOW_PRECISION, Tolerance

__all__ = ["TIME_LIMIT", "play_all"]

SIDES: dict[str, type[Side]] = {"wrapped": Wrapped, "composed": Composed}
# Seconds until a rank gets an error if the other rank does not take part.
TIME_LIMIT = 1.0
# The format of minifsdp's messages; torch puts text of its own before some of them.
OURS = re.compile(r"(^|\n|\s)rank \d+: ")
# gloo's errors on a rank whose peer does not arrive or has ended.
OF_GLOO = re.compile(r"[Tt]imed out|[Tt]imeout|Connection (closed|reset)|gloo|Broken pipe|Socket|recv", re.DOTALL)
# Errors for ranks that have made different calls; their state is unknown afterwards. Other errors leave the state
# unchanged.
PARTED = re.compile(
    r"E-(about-to-part|collective-failed|different-order|missing-ranks|order-differs|state-dict-refused|waits-in-vain)"
)
# Python's own message, which names the function.
PYTHONS = re.compile(r"\(\) got an unexpected keyword argument")
END: tuple[Call, ...] = (
    {"do": "zero_grad", "to_none": True, "of_model": False},
    {"do": "forward", "batch": 7},
    {"do": "backward", "which": "all"},
    {"do": "step"},
    {"do": "evaluate", "batch": 8},
)


class Player:
    """One program on this rank.

    Args:
        case: the program.
        group: the ranks that shard the model.

    Attributes:
        log: the result of each call: ``"ok"``, or the identifier of the error.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case, self.rank = case, group.rank()
        self.side = SIDES[case.api](case.options, group)
        self.twin = Twin(case.options, self.rank)
        # In mixed precision, units compute in float32.
        self.tolerance: Tolerance = FLOAT if case.options.get("mixed") else DOUBLE
        # Whether gradients were computed in float32 while everything else is exact.
        self.is_rounded = False
        if case.options.get("begins") == "float":
            self.tolerance = FLOAT
        if case.options.get("full_in_eval"):
            self.tolerance = DOUBLE
        self.log: list[str] = []
        self.found: str | None = None

    def play(self) -> None:
        """Makes all calls, and an ordinary step. A finding is only recorded, because both ranks must continue."""
        for call in self.case.calls:
            self.make(call)
        while self.side.contexts:
            self.make({"do": "leave"})
        self._end()

    def _end(self) -> None:
        if self.case.api == "composed":
            self.make({"do": "sync", "value": True})
            self.make({"do": "keep_after_backward", "value": False})
        elif self.twin.waiting_units:
            self.make(END[0])
        self.make({"do": "backward", "which": "all"})
        for call in END:
            said = self.make(call)
            if said != "ok" and not (self.case.is_apart and said.startswith("E-")):
                self._note(f"no end: {call} ended in {said}")
        if self.case.is_apart:
            if self.twin.discord:
                self._note("discord: the ranks have done different things, and all came to the end")
            if not self.twin.is_shifted:
                self._compare(self.side.parameters_against(self.twin))

    def _note(self, finding: str) -> None:
        self.found = self.found or f"{finding}\nafter {self.log}"

    @property
    def _compares(self) -> bool:
        """Whether to compare after each call. With different calls, an error can come later than a wrong gradient."""
        return not self.case.is_apart

    def make(self, call: Call) -> str:
        """Makes one call. Returns its result."""
        # With the wrapper, ranks can train separately (local SGD) if each rank has all of the parameters.
        is_whole = self.case.options.get("strategy") == "NO_SHARD" or self.case.options.get("replicas") == 2
        if call["do"] == "step" and self.case.api == "wrapped" and is_whole and self.twin.waiting_units:
            call = {"do": "zero_grad", "to_none": True, "of_model": True}
        if call["do"] in ("forward", "evaluate", "generate") and self.side.is_summoned:
            call = self._in_summon(call)
        mine = call.get("on", self.rank) == self.rank
        ranks = (call["on"],) if "on" in call else (0, 1)
        given, error = self._try(self.side, call) if mine else (None, None)
        said = "ok"
        if error is not None:
            said = self._judged(call, error, ranks)
        else:
            self._follow(call, given, ranks, mine=mine)
        self.log.append(f"{call['do']}: {said}")
        if self._compares and self.found is None:
            # Gradients of a forward before a conversion were rounded in another dtype.
            was_converted = any(entry.startswith("convert") for entry in self.log)
            rounds = was_converted or bool(self.case.options.get("mixed"))
            self._compare(self._kept_against(), FLOAT if rounds else None)
        if self._compares and not self.side.is_summoned:
            # The values of a conversion were rounded in the previous dtype.
            rounds = bool(self.case.options.get("full_in_eval")) or call["do"] == "convert"
            if self.found is None:
                self._compare(self.side.parameters_against(self.twin), FLOAT if rounds else None)
                # In evaluation mode with full precision, gradients are exact, too.
                self._compare(self.side.gradients_against(self.twin), FLOAT if self.is_rounded or rounds else None)
            # All ranks take part, including those with a finding.
            # A bfloat16 gradient is accumulated in another dtype before its reduction.
            rounds |= "dtypes" in (self.case.options.get("kinds") or [])
            if call["do"] == "convert" or (call["do"] == "step" and rounds):
                self._take_over()
        return said

    def _in_summon(self, call: Call) -> Call:
        """A forward with full parameters. It can have no backward, and with ``rank0_only`` only rank 0 can run it."""
        if not self.side.keeps_edits and any(entry.startswith("edit") for entry in self.log):
            # The reference model does not have the edited values, which are lost after the context.
            return {"do": "nothing"}
        call = {**call, "do": "evaluate"} if call["do"] == "forward" else call
        if not self.side.hides_from_some:
            return call
        return {**{key: value for key, value in call.items() if key != "bang"}, "on": 0}

    def _kept_against(self) -> Pieces:
        """The gradients of all forwards so far that hooks have kept: of the input, and between the blocks."""
        return {
            f"gradient of {name} in forward {number}": (mine.gradients.get(name), expected)
            for number, (mine, plain) in enumerate(zip(self.side.kept, self.twin.kept, strict=True))
            for name, expected in plain.gradients.items()
        }

    def _take_over(self) -> None:
        """Copies the ranks' values to the reference model, because later comparisons are more exact."""
        shards: dict[str, Any] = {name: mine for name, (mine, _) in self.side.parameters_against(self.twin).items()}
        everybody: list[Any] = [shards, shards]
        dist.all_gather_object(everybody, shards)
        _, of_all = self.side.local_shard
        values = dict(self.twin.net.named_parameters())
        with torch.no_grad():
            for name in shards:
                parts = [shards[name]] if of_all == 1 else [each[name] for each in everybody]
                for key, value in self.side.joined(name, parts, self.twin).items():
                    values[key].copy_(value)

    def _try(self, side: Any, call: Call, *rest: Any) -> tuple[Any, BaseException | None]:
        try:
            return getattr(side, call["do"])(call, *rest), None
        except Exception as error:
            return None, error

    def _judged(self, call: Call, error: BaseException, ranks: tuple[int, ...]) -> str:
        """Classifies an error: returns its identifier, or records a finding."""
        text = str(error)
        if call["do"] in ("backward", "load"):
            # The remaining graphs were freed, or were computed from other values.
            self.side.changed()
            self.twin._changed()
            # An interrupted backward has called only some of the hooks.
            self.side.kept.clear()
            self.twin.kept.clear()
        if OURS.search(text):
            entry = re.search(r"#(E-[a-z0-9-]+)", text)
            said = entry.group(1) if entry else text.splitlines()[0]
            if self._is_in_order(call):
                self._note(f"refused: {call} was in order, and ended in {type(error).__name__}: {text}")
            return said
        if self.case.is_apart and OF_GLOO.search(text):
            raise error
        # The program is wrong for any model, or the call did not reach minifsdp.
        leaves_traces = call["do"] in ("forward", "evaluate", "generate", "strange_input", "backward", "backward_again")
        # PyTorch's own `load_state_dict` copies matching entries before it raises.
        leaves_traces |= call["do"] == "load" and self.side.has_to_load(call)
        _, expected = self._try(self.twin, call, ranks) if leaves_traces else (None, None)
        if expected is None and call["do"] in ("forward", "evaluate", "generate"):
            self._note(f"bare error: {call} went well in one process, and here: {type(error).__name__}: {text}")
        where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not any(map(is_of_package, where)):
            return f"torch: {type(error).__name__}"
        if PYTHONS.search(text):
            return "of Python: a name that the function does not have"
        if expected is not None and isinstance(error, type(expected)):
            return f"as in one process: {type(error).__name__}"
        shown = "".join(traceback.format_exception(error))[-3000:]
        self._note(f"bare error: {call}: {type(error).__name__}: {text}\n{shown}")
        return f"bare error: {type(error).__name__}"

    def _is_in_order(self, call: Call) -> bool:
        """Whether the call is correct, so that minifsdp must not refuse it."""
        if self.side.is_summoned or self.case.is_apart:
            return False
        if call["do"] in ("step", "clip"):
            return not self.twin.waiting_units
        if call["do"] == "new_optimizer" and self.side.pending:
            # Original parameters can be views until their backward. PyTorch's optimizers refuse such tensors.
            return not self.case.options.get("originals")
        return call["do"] in (
            "forward",
            "evaluate",
            "backward",
            "zero_grad",
            "mode",
            "save",
            "edit",
            "apply",
            "generate",
            "new_optimizer",
            "convert",
        )

    def _follow(self, call: Call, given: Any, ranks: tuple[int, ...], *, mine: bool) -> None:
        """Makes the same call on the reference model."""
        if call["do"] == "convert" and call["dtype"] == "double" and not self.case.options.get("mixed"):
            self.tolerance = DOUBLE
        elif call["do"] == "convert":
            self.tolerance = FLOAT
        is_dropped = call["do"] == "zero_grad" and not self.side.is_summoned
        if is_dropped and not any((*self.twin.pending, self.twin.waiting_units)):
            self.is_rounded = False
        if call["do"] == "clip":
            # The norm is computed in float32 on both sides, or for a DTensor in its own dtype.
            has_low = self.case.api == "composed" and "dtypes" in (self.case.options.get("kinds") or [])
            self.tolerance = LOW_PRECISION if has_low else FLOAT
        expected, error = self._try(self.twin, self._in_effect(call), ranks)
        # This rank does not have a state that only the other rank has saved.
        if error is not None and not (self.case.is_apart and call["do"].startswith("load")):
            self._note(f"lenient: {call} went well here, and in one process: {type(error).__name__}: {error}")
        if not self._compares or not mine:
            return
        if isinstance(expected, torch.Tensor):
            in_low = bool(self.case.options.get("full_in_eval")) and self.twin.net.training
            self.is_rounded |= in_low and call["do"] == "forward"
            self._compare({f"result of {call}": (given, expected)}, FLOAT if in_low else None)
        elif call["do"] == "save" and given is not None:
            self._compare(self.side.saved_against(call["form"], given, self.twin.saved[-1]))
        elif call["do"] == "enter":
            full = dict(self.twin.net.named_parameters())
            self._compare({f"full {name!r}": (value, full.get(name)) for name, value in self.side.sees(call).items()})

    def _in_effect(self, call: Call) -> Call:
        """The call as the reference model must make it: edits in a context without writeback have no effect."""
        hides = self.side.hides_from_some
        is_lost = {
            "edit": hides or not self.side.keeps_edits,
            "save": hides or (self.side.is_summoned and not self.side.keeps_edits),
            "zero_grad": self.side.is_summoned,
            "new_optimizer": self.side.is_summoned,
        }.get(call["do"], False)
        if is_lost and call["do"] == "edit":
            # Pending losses are dropped on the sharded side, so they are dropped here, too.
            self.twin._changed()
        return {"do": "nothing"} if is_lost else call

    def _compare(self, local_shards: Pieces, tolerance: Tolerance | None = None) -> None:
        for name, (mine, expected) in local_shards.items():
            chosen = tolerance or self.tolerance
            if not isinstance(mine, torch.Tensor) or expected is None or mine.shape != expected.shape:
                self._note(f"differs: {name}: {_shown(mine)} here, {_shown(expected)} in one process")
                continue
            if expected.dtype == torch.bfloat16:
                chosen = LOW_PRECISION
            elif expected.dtype == torch.float32 and chosen is DOUBLE:
                chosen = FLOAT
            # complex128 can represent the values of every dtype.
            mine, expected = (tensor.detach().to(torch.complex128) for tensor in (mine, expected))
            if not torch.allclose(mine, expected, rtol=chosen.rtol, atol=chosen.atol, equal_nan=True):
                self._note(f"differs: {name}, by up to {float((mine - expected).abs().max()):.3g}")


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


# --- all programs of a task ---


def play_all(texts: list[str], folder: str) -> None:
    """Runs the programs, given as JSON. Every rank must call it with the same programs.

    Each rank writes one file into ``folder``: for each program its log and the finding, or ``null``.
    """
    results = []
    if any(from_json(text).is_apart for text in texts):
        # Without a transport, no rank can check with the others before it sends a new size, and gloo ends the process.
        os.environ["MINIFSDP_TRANSPORT"] = "messages"
    for text in texts:
        result = _result_of(from_json(text))
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, result)
        found = _together(from_json(text), everybody, result)
        results.append({"log": result["log"], "found": found, "ended": bool(result["ended"])})
        gc.collect()
    pathlib.Path(folder, str(dist.get_rank())).write_text(json.dumps(results))


# The pool uses this name for the undecorated body of a test.
play_all.body_on_a_rank = play_all  # type: ignore[attr-defined]


def _together(case: Case, everybody: list[Any], mine: dict[str, Any]) -> str | None:
    are_alike = len({tuple(map(_is_ok, result["log"])) for result in everybody}) == 1
    mine["ended"] = mine["ended"] or (case.is_apart and not are_alike)
    if mine["found"] is not None:
        # A finding can be only a consequence: another rank has got an error, and its program has ended.
        others = mine["ended"] or any(result["ended"] for result in everybody)
        return None if others and mine["found"].startswith(("discord", "differs")) else mine["found"]
    if not case.is_apart and not are_alike and not any(result["found"] for result in everybody):
        return f"the ranks were told different things: {[result['log'] for result in everybody]}"
    return None


def _is_ok(said: str) -> bool:
    return said.endswith(": ok")


def _result_of(case: Case) -> dict[str, Any]:
    group = dist.group.WORLD
    if case.is_apart:
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIME_LIMIT))
    player, found, ended = None, None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            player = Player(case, group)
            player.play()
            found = player.found
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            if not case.is_apart:
                found = "crash: " + "".join(traceback.format_exception(error))[-3000:]
            found = found or (player.found if player is not None else None)
        finally:
            if player is not None and ended:
                for _, stack in reversed(player.side.contexts):
                    with contextlib.suppress(Exception):
                        stack.close()
    log = player.log if player is not None else []
    if case.is_apart:
        ended = ended or next((said for said in log if PARTED.search(said)), None)
    return {"log": log, "found": found, "ended": ended}
