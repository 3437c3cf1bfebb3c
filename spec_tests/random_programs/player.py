"""Runs a program on a rank: makes each call on the sharded model and on the reference, and records errors.

After every call, one of these must be true:

* the result of the call, the parameters and the gradients are equal to those of the reference; or
* the call has raised an error of minifsdp, whose text begins with ``rank N:``, and the model has not changed; or
* the reference has raised an error of the same kind, so the program is wrong for any model.

A finding is one of these:

* *differs*: an output, a parameter, a gradient or a saved value is not equal to the reference's;
* *bare error*: an error from minifsdp without its message format, which the reference has not raised;
* *refused*: an error of minifsdp for a correct call;
* *lenient*: the reference has raised an error, and the sharded model has not;
* *no end*: the ordinary step after all calls fails;
* *discord*: ranks have made different calls, and all reached the end.

A finding is recorded and not raised, because the other ranks do not see it and continue, so this rank must continue as
well. A training loop ends at its first error, because all of its calls are correct.

Tolerances: with at most two ranks, and no parameter used more than twice in a backward, every sum has one or two terms.
Such a sum does not depend on the order of its terms, so the comparison is bitwise. Reentrant checkpointing runs a
backward inside the backward, after which a unit may be reduced before its gradient is complete. Two uses are then two
sums over ranks, so the limit is one use, or none if there are unreduced gradients. All other programs use float64,
where the effect of the order is far below that of any defect, even in a deep model: `DOUBLE` of
``oracles/compare.py``. Mixed precision uses float32 and `LOW_PRECISION`. The absolute tolerance is relative to the
largest element, because the rounding of a large term in a sum also affects small results.
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
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.harness.checkout import is_of_package
from spec_tests.healthy.quiet import says_nothing_wrong
from spec_tests.oracles.compare import BIT_EQUAL, DOUBLE, FLOAT, LOW_PRECISION, Tolerance
from spec_tests.random_programs.description import (
    Call,
    Description,
    calls_of,
    from_json,
    num_uses,
    step_of,
)
from spec_tests.random_programs.front_ends import Group
from spec_tests.random_programs.reference import Reference
from spec_tests.random_programs.sides import MEANINGLESS, side_of

# Seconds until a rank gets an error if the other rank does not take part.
TIME_LIMIT = 1.0
# The format of minifsdp's messages; torch puts text of its own before some of them.
OURS = re.compile(r"(^|\n|\s)rank \d+: ")
# gloo's errors on a rank whose peer does not arrive or has ended.
OF_GLOO = re.compile(r"[Tt]imed out|[Tt]imeout|Connection (closed|reset)|gloo|Broken pipe|Socket|recv", re.DOTALL)
# Errors for ranks that have made different calls; their state is unknown afterwards. Other errors leave the state
# unchanged.
PARTED = re.compile(r"E-(about-to-part|collective-failed|missing-ranks|order-differs|state-dict-refused|waits-in-vain)")
# The messages of Python, which names the function, and of `Module.load_state_dict`, which names the keys.
NOT_OURS = re.compile(r"\(\) got an unexpected keyword argument|Error\(s\) in loading state_dict")
# A unit that runs in every other step only confuses a prefetch. The next three are also in ``pyproject.toml``.
EXPECTED_WARNINGS = (
    "rank .*: forward_prefetch expects the units to run in the order",
    "None of the inputs have requires_grad=True",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "rank .*: FSDP.state_dict_type.. and FSDP.set_state_dict_type.. are deprecated",
    "Please use DTensor instead",
    # From the first module, whose input is the batch.
    "Full backward hook is firing when gradients are computed with respect to module outputs",
    "clip_grad_norm_ was called on rank . with no gradients",
)
END: tuple[Call, ...] = (
    {"do": "zero_grad", "to_none": True, "of_model": False},
    {"do": "forward", "batch": 7},
    {"do": "backward", "which": "all"},
    {"do": "step"},
    {"do": "evaluate", "batch": 8},
)
COMPUTING = ("forward", "evaluate", "generate")
# The calls that minifsdp must not refuse.
IN_ORDER = (*COMPUTING, "backward", "zero_grad", "mode", "save", "edit", "apply", "new_optimizer", "convert")


def tolerance_of(d: Description) -> Tolerance:
    """The tolerance for comparing with the reference."""
    if d.dtype:
        return FLOAT if (d.dtype == "float" or d.precision == "single") and not d.full_in_eval else DOUBLE
    most = 2
    if d.is_reentrant:
        most = 1 if all(d.micro_batches) else 0
    # Per-parameter gradients wait in the dtype of the reduction, those of the reference in the compute dtype.
    waits = d.is_per_parameter and not all(d.micro_batches)
    rounds = waits and "summed" in d.precision
    if waits:
        # They are reduced when the inputs of the last call are reached; the other calls add a second reduction. This is
        # the same in torch.
        most = min(most, 0 if d.forwards > 1 else 1)
    if d.num_ranks <= 2 and num_uses(d) <= most and not rounds:
        return BIT_EQUAL
    return DOUBLE if d.precision == "full" else LOW_PRECISION


class Player:
    """One program on this rank.

    Args:
        d: the program.
        group: the ranks that shard the model, if not all.

    Attributes:
        log: the result of each call: ``"ok"``, or the identifier of the error.
        found: the first finding.
    """

    def __init__(self, d: Description, group: Group) -> None:
        self.d, self.rank, self.group = d, dist.get_rank(group), group
        self.tolerance = tolerance_of(d)
        # Whether gradients were computed in float32 while everything else is exact.
        self.is_rounded = False
        self.log: list[str] = []
        self.found: str | None = None
        # Whether an error has interrupted a backward, so that the gradients are not those of the reference.
        self.is_interrupted = False
        self.reference = Reference(d, self.rank)
        self.side: Any = side_of(d, group)

    def play(self) -> None:
        """Makes all calls. After calls in any order it also makes an ordinary step, which must succeed."""
        if self.d.steps:
            self._compare_parameters()
        for call in calls_of(self.d):
            if call["do"] == "resume":
                self._resume(call["step"])
            else:
                self.make(call)
            if self._ends(self.d.steps > 0):
                return
        while self.side.contexts:
            self.make({"do": "leave"})
        if not self.d.steps:
            self._end()

    def _ends(self, is_loop: bool) -> bool:
        """Whether nothing can be trained, or a call of a training loop has failed."""
        if self.side.is_over or MEANINGLESS in self.log[-1]:
            return True
        if is_loop and not self.log[-1].endswith(": ok"):
            self._note(f"no end: {self.log[-1]}")
            return True
        return False

    def _end(self) -> None:
        if self.d.is_per_parameter:
            self.make({"do": "sync", "value": True})
            self.make({"do": "keep_after_backward", "value": False})
        elif self.reference.waiting_units:
            self.make(END[0])
        self.make({"do": "backward", "which": "all"})
        for call in END:
            said = self.make(call)
            if said != "ok" and not (self.d.is_apart and said.startswith("E-")):
                self._note(f"no end: {call} ended in {said}")
        if self.d.is_apart:
            if self.reference.discord:
                self._note("discord: the ranks ran different programs, and all have ended")
            if not self.reference.is_shifted:
                self._compare_parameters()

    def _resume(self, step: int) -> None:
        """Compares a step of this model with the same step of a model loaded from a state saved before it.

        This order matters: if the saved state shared memory with the model, the step would change it.
        """
        form, optimizer = self.d.resumes, self.side.optimizer
        if optimizer is None:
            return
        missing = {p for p in self.side.model.parameters() if p.requires_grad} - optimizer.state.keys()
        if self.d.is_per_parameter and (missing or not optimizer.state):
            # torch's functions require a state for each trained parameter, even for one that never had a gradient, and
            # they do not send the states of an optimizer without states.
            form = "own"
        saved = self.side.state(form), self.side.optimizer_state(form)
        for call in step_of(self.d, step):
            self.make(call)
            if self._ends(True):
                return
        uninterrupted = {name: local(parameter).clone() for name, parameter in self.side.owned.items()}
        resumed: Any = side_of(replace(self.d, seed=self.d.seed + 1), self.group)
        resumed.resume(form, *saved)
        resumed.d = self.d
        for call in step_of(self.d, step):
            if call["do"] in ("begin_step", "sync", "forward", "backward", "step"):
                getattr(resumed, call["do"])(call)
        for name, parameter in resumed.owned.items():
            what = f"value of {name!r} after step {step}, resumed from a {form} state"
            self._compare(what, parameter, uninterrupted[name], BIT_EQUAL)

    def _note(self, finding: str) -> None:
        self.found = self.found or f"{finding}\nafter {self.log}"

    # --- a call ---

    def make(self, call: Call) -> str:
        """Makes one call. Returns its result."""
        # With the wrapper, ranks can train separately (local SGD) if each rank has all of the parameters.
        is_whole = len(self.side.sharers(self.d.model)) == 1 and not self.d.is_per_parameter
        if call["do"] == "step" and is_whole and self.reference.waiting_units:
            call = {"do": "zero_grad", "to_none": True, "of_model": True}
        if call["do"] in COMPUTING and self.side.is_summoned:
            call = self._in_summon(call)
        mine = call.get("on", self.rank) == self.rank
        self.reference.calling = (call["on"],) if "on" in call else self.reference.ranks
        given, error = self._try(self.side, call) if mine else (None, None)
        said = "ok"
        if error is not None:
            said = self._judged(call, error)
        else:
            said = self._follow(call, given, mine=mine)
        self.log.append(f"{call['do']}: {said}")
        # With different calls, an error can come later than a wrong gradient.
        if not self.d.is_apart and MEANINGLESS not in said and not self.side.is_over:
            self._compare_all(call)
        return said

    def _in_summon(self, call: Call) -> Call:
        """A forward with full parameters. It can have no backward, and with ``rank0_only`` only rank 0 can run it."""
        if not self.side.keeps_edits and any(entry.startswith("edit") for entry in self.log):
            # The reference does not have the edited values, which are lost after the context.
            return {"do": "nothing"}
        call = {**call, "do": "evaluate"} if call["do"] == "forward" else call
        if not self.side.hides_from_some:
            return call
        return {**{key: value for key, value in call.items() if key != "bang"}, "on": 0}

    def _try(self, side: Any, call: Call) -> tuple[Any, BaseException | None]:
        try:
            return getattr(side, call["do"])(call), None
        except Exception as error:
            return None, error

    def _judged(self, call: Call, error: BaseException) -> str:
        """Classifies an error: returns its identifier, or records a finding."""
        text = str(error)
        if MEANINGLESS in text:
            _, expected = self._try(self.reference, call)
            if MEANINGLESS in str(expected):
                return MEANINGLESS
        if call["do"] in ("backward", "load") or "load_state_dict" in call.get("line", ""):
            # The remaining graphs were freed, or were computed from other values.
            self.side.changed()
            self.reference.changed()
            # An interrupted backward has called only some of the hooks.
            self.side.kept.clear()
            self.reference.kept.clear()
        if OURS.search(text):
            entry = re.search(r"#(E-[a-z0-9-]+)", text)
            said = entry.group(1) if entry else text.splitlines()[0]
            if self._is_in_order(call):
                self._note(f"refused: {call} is allowed, and raised {type(error).__name__}: {text}")
            return said
        if self.d.is_apart and OF_GLOO.search(text):
            raise error
        # The program is wrong for any model, or the call did not reach minifsdp.
        leaves_traces = call["do"] in (*COMPUTING, "strange_input", "backward", "backward_again")
        # PyTorch's own `load_state_dict` copies matching entries before it raises.
        leaves_traces |= call["do"] == "load" and self.side.has_to_load(call)
        _, expected = self._try(self.reference, call) if leaves_traces else (None, None)
        if expected is None and call["do"] in COMPUTING:
            self._note(f"bare error: {call} succeeded in one process, and raised here: {type(error).__name__}: {text}")
        where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if self.d.steps == 0 and not any(map(is_of_package, where)):
            return f"torch: {type(error).__name__}"
        if NOT_OURS.search(text):
            return "of Python or torch: a name that the function or the model does not have"
        if expected is not None and isinstance(error, type(expected)):
            return f"as in one process: {type(error).__name__}"
        shown = "".join(traceback.format_exception(error))[-3000:]
        self._note(f"bare error: {call}: {type(error).__name__}: {text}\n{shown}")
        return f"bare error: {type(error).__name__}"

    def _is_in_order(self, call: Call) -> bool:
        """Whether the call is correct, so that minifsdp must not refuse it."""
        if self.side.is_summoned or self.d.is_apart:
            return False
        if call["do"] in ("step", "clip"):
            return not self.reference.waiting_units
        if call["do"] == "new_optimizer" and self.side.pending:
            # Original parameters can be views until their backward. PyTorch's optimizers refuse such tensors.
            return not self.d.originals or self.d.is_per_parameter
        return call["do"] in IN_ORDER

    def _follow(self, call: Call, given: Any, *, mine: bool) -> str:
        """Makes the same call on the reference."""
        if call["do"] == "convert":
            self.tolerance = DOUBLE if call["dtype"] == "double" and self.d.precision == "full" else FLOAT
        is_dropped = call["do"] == "zero_grad" and not self.side.is_summoned
        if is_dropped and not any((*self.reference.pending, self.reference.waiting_units)):
            self.is_rounded = False
        expected, error = self._try(self.reference, self._in_effect(call))
        if error is not None and MEANINGLESS in str(error):
            return MEANINGLESS
        # This rank does not have a state that only the other rank has saved.
        if error is not None and not (self.d.is_apart and call["do"].startswith("load")):
            self._note(f"lenient: {call} succeeded here, and raised in one process: {type(error).__name__}: {error}")
        if self.d.is_apart or not mine:
            return "ok"
        if isinstance(expected, Tensor):
            in_low = self.d.full_in_eval and self.reference.model.training
            self.is_rounded |= in_low and call["do"] == "forward"
            tolerance = FLOAT if in_low else None
            if call["do"] == "clip":
                given, tolerance = given.to(expected.dtype), self._tolerance_of_norms()
            self._compare(f"result of {call}", given, expected, tolerance)
        elif call["do"] == "save" and given is not None:
            for what, (value, whole) in self.side.saved_against(call["form"], given, self.reference.saved[-1]).items():
                self._compare(what, value, whole)
        elif call["do"] == "enter":
            full = self.reference.single.parameters
            for name, value in self.side.sees(call).items():
                self._compare(f"full {name!r}", value, full.get(name))
        return "ok"

    def _tolerance_of_norms(self) -> Tolerance:
        """Norms of shards are added in another order than norms of parameters; for a DTensor in its own dtype."""
        has_low = self.tolerance is LOW_PRECISION or (self.d.is_per_parameter and self.d.has("dtypes"))
        tolerance = LOW_PRECISION if has_low else FLOAT
        if not self.d.steps:
            # Gradients are multiplied by the norm.
            self.tolerance = tolerance
        return tolerance

    def _in_effect(self, call: Call) -> Call:
        """The call as the reference must make it: edits in a context without writeback have no effect."""
        hides = self.side.hides_from_some
        is_lost = {
            "edit": hides or not self.side.keeps_edits,
            "save": hides or (self.side.is_summoned and not self.side.keeps_edits),
            "zero_grad": self.side.is_summoned,
            "new_optimizer": self.side.is_summoned,
        }.get(call["do"], False)
        if is_lost and call["do"] == "edit":
            # Pending losses are dropped on the sharded side, so they are dropped here, too.
            self.reference.changed()
        if call["do"] == "sync" and not self.d.is_per_parameter:
            return {"do": "leave"} if call["value"] else {"do": "enter", "what": "no_sync"}
        return {"do": "nothing"} if is_lost else call

    # --- comparing ---

    def _compare_all(self, call: Call) -> None:
        is_loop = self.d.steps > 0
        if call["do"] == "break_off":
            self.is_interrupted = True
        elif call["do"] == "zero_grad":
            self.is_interrupted = False
        if self.found is None and (not is_loop or call["do"] == "backward"):
            self._compare_kept()
        if self.side.is_summoned or self.found is not None:
            self._take_over_if_rounded(call)
            return
        # The values of a conversion were rounded in the previous dtype.
        rounds = self.d.full_in_eval or call["do"] == "convert"
        if not is_loop or call["do"] in ("step", "edit"):
            self._compare_parameters(FLOAT if rounds else None)
        if not is_loop or call["do"] == "backward":
            # In evaluation mode with full precision, gradients are exact, too.
            self._compare_gradients(FLOAT if self.is_rounded or rounds else None)
        self._take_over_if_rounded(call)

    def _compare_kept(self) -> None:
        """Compares the gradients of all forwards so far that hooks have kept: of the input, and between the parts."""
        # Gradients of a forward before a conversion were rounded in another dtype.
        rounds = self.d.precision == "single" or any(entry.startswith("convert") for entry in self.log)
        for number, (mine, plain) in enumerate(zip(self.side.kept, self.reference.kept, strict=True)):
            for name, expected in plain.gradients.items():
                what = f"gradient of {name} in forward {number}"
                self._compare(what, mine.gradients.get(name), expected, FLOAT if rounds else None)

    def _compare_parameters(self, tolerance: Tolerance | None = None) -> None:
        whole = {name: parameter.detach() for name, parameter in self.reference.model.named_parameters()}
        expected = self.side.expected(whole)
        if self.side.owned.keys() != expected.keys():
            self._note(f"differs: parameters: {sorted(self.side.owned)} here, expected {sorted(expected)}")
            return
        for name, parameter in self.side.owned.items():
            self._compare(f"value of {name!r}", parameter, expected[name], tolerance)

    def _compare_gradients(self, tolerance: Tolerance | None = None) -> None:
        if self.is_interrupted:
            return
        parameters = dict(self.reference.model.named_parameters())
        filled = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        expected = self.side.expected(filled)
        # With the wrapper, unreduced gradients are in `.grad`.
        waiting = set() if self.d.is_per_parameter else self.reference.waiting_units
        unit_of = {**self.reference.single.unit_of, **{unit: unit for unit in self.reference.units}}
        absent = self._without_gradient({name: p.grad is None for name, p in parameters.items()})
        for name, parameter in self.side.owned.items():
            what = f"gradient of {name!r}"
            if unit_of[name] in waiting:
                continue
            if parameter.grad is None:
                self._compare(
                    f"{what}, which is not there", torch.zeros_like(expected[name]), expected[name], tolerance
                )
            elif name in absent and self.d.clears and self.d.steps:
                self._note(f"differs: {what} is {local(parameter.grad)}, and no backward has computed it")
            else:
                self._compare(what, parameter.grad, expected[name], tolerance)

    def _without_gradient(self, is_absent: dict[str, bool]) -> set[str]:
        """Names that must not have a gradient.

        All parameters of a flat tensor have a gradient, possibly zeros, if one of them has. If some are frozen,
        autograd treats them as trained, so any of them may cause this.
        """
        if self.d.is_per_parameter:
            return {name for name, placeholder in is_absent.items() if placeholder}
        trained = {name: p.requires_grad for name, p in self.reference.model.named_parameters()}
        units = {unit: names for unit, (_, names) in self.reference.units.items() if all(is_absent[n] for n in names)}
        units = {unit: names for unit, names in units.items() if len({trained[name] for name in names}) == 1}
        return {name for names in units.values() for name in names} if self.d.originals else set(units)

    def _compare(self, what: str, ours: Any, expected: Any, tolerance: Tolerance | None = None) -> None:
        if not isinstance(ours, Tensor) or expected is None:
            self._note(f"differs: {what}: {_shown(ours)} here, {_shown(expected)} in one process")
            return
        ours = local(ours)
        # With CPU offload, ours is on the CPU.
        expected = expected.detach().to(ours.device)
        if ours.numel() == expected.numel() and 1 in (ours.dim(), expected.dim()):
            # The wrapper's shards are 1-D.
            expected = expected.reshape(ours.shape)
        if ours.dtype == expected.dtype and torch.equal(ours, expected):
            return  # the usual case; takes a tenth of the time of the lines below
        chosen = tolerance or self.tolerance
        if expected.dtype == torch.bfloat16:
            chosen = LOW_PRECISION
        elif expected.dtype == torch.float32 and chosen is DOUBLE:
            chosen = FLOAT
        largest = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
        try:
            torch.testing.assert_close(
                ours,
                expected,
                rtol=chosen.rtol,
                atol=chosen.atol * max(1.0, largest),
                equal_nan=True,
                check_dtype=self.d.steps > 0,
            )
        except AssertionError as error:
            shown = f"{error}\nhere     {ours.tolist()}\nexpected {expected.tolist()}"
            self._note(f"differs: {what} ({chosen.name}), {shown}")

    def _take_over_if_rounded(self, call: Call) -> None:
        """Copies the ranks' values to the reference where they were rounded, so that later comparisons are exact.

        All ranks take part, including those with a finding.
        """
        if self.d.steps or self.side.is_summoned:
            return
        # A bfloat16 gradient is accumulated in another dtype before its reduction.
        rounds = self.d.full_in_eval or self.d.has("dtypes")
        if call["do"] != "convert" and not (call["do"] == "step" and rounds):
            return
        shards = {name: local(parameter) for name, parameter in self.side.owned.items()}
        all_ranks: list[Any] = [None] * self.d.num_ranks
        dist.all_gather_object(all_ranks, shards)
        values = dict(self.reference.model.named_parameters())
        with torch.no_grad():
            for name, value in self.side.joined(all_ranks).items():
                values[name].copy_(value)


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _shown(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


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
        d = from_json(text)
        result = _result_of(d)
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, result)
        found = _together(d, all_ranks, result)
        results.append({"log": result["log"], "found": found})
        if any(not all(map(_is_ok, each["log"])) or each["found"] for each in all_ranks):
            # Objects of a failed run must not affect the next one.
            gc.collect()
    pathlib.Path(folder, str(dist.get_rank())).write_text(json.dumps(results))


# The pool uses this name for the undecorated body of a test.
play_all.body_on_a_rank = play_all  # type: ignore[attr-defined]


def _together(d: Description, all_ranks: list[Any], mine: dict[str, Any]) -> str | None:
    are_alike = len({tuple(map(_is_ok, result["log"])) for result in all_ranks}) == 1
    mine["ended"] = mine["ended"] or (d.is_apart and not are_alike)
    if mine["found"] is not None:
        # A finding can be only a consequence: another rank has got an error, and its program has ended.
        others = d.is_apart and (mine["ended"] or any(result["ended"] for result in all_ranks))
        return None if others and mine["found"].startswith(("discord", "differs")) else mine["found"]
    if not d.is_apart and not are_alike and not any(result["found"] for result in all_ranks):
        return f"the results of the ranks differ: {[result['log'] for result in all_ranks]}"
    return None


def _is_ok(said: str) -> bool:
    return said.endswith(": ok")


def _result_of(d: Description) -> dict[str, Any]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIME_LIMIT)) if d.is_apart else None
    player, found, ended = None, None, None
    is_double = d.dtype == "double" or (not d.dtype and tolerance_of(d) is DOUBLE)
    torch.set_default_dtype(torch.float64 if is_double else torch.float32)
    with warnings.catch_warnings():
        # Calls in the wrong order can also warn.
        warnings.simplefilter("error" if d.steps else "ignore")
        for expected in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", f".*{expected}")
        try:
            player = Player(d, group)
            with says_nothing_wrong() if d.steps else contextlib.nullcontext():
                player.play()
            found = player.found
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            if not d.is_apart:
                # Also printed: if the other ranks continue and hang, this is the only output.
                traceback.print_exc()
                found = "crash: " + "".join(traceback.format_exception(error))[-3000:]
            found = found or (player.found if player is not None else None)
        finally:
            if player is not None and ended:
                for _, stack in reversed(player.side.contexts):
                    with contextlib.suppress(Exception):
                        stack.close()
            torch.set_default_dtype(torch.float32)
    log = player.log if player is not None else []
    if d.is_apart:
        ended = ended or next((said for said in log if PARTED.search(said)), None)
    return {"log": log, "found": found, "ended": ended}
