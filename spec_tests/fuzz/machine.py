"""Draws programs with a state machine of hypothesis, whose rules record calls.

It runs nothing. It tracks only the state that it needs to draw useful programs: whether a loss waits for its
backward, whether a context is open, and what was saved. Most rules can be drawn at any time, so the order is often
wrong. `train` records a whole step at once, so that many calls are also in the correct order.

Hypothesis turns off random rules, different ones for each program. So programs differ in kind, not only in order.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from spec_tests.fuzz import composed, wrapped
from spec_tests.fuzz.case import Call, Case
from spec_tests.fuzz.net import KINDS, NUM_BLOCKS
from spec_tests.fuzz.wrong import WRONG_COMPOSED, WRONG_WRAPPED

__all__ = ["drawn"]

NUM_CALLS, BATCH = 14, 10

batches = st.integers(0, 3)
parts = st.none() | st.integers(0, NUM_BLOCKS - 1)
flags = st.booleans()
# A flat parameter has one dtype.
FLAT_KINDS = tuple(kind for kind in KINDS if kind not in ("both", "dtypes"))
steps_by = st.sampled_from([None, "foreach", "foreach", "fused"])
edits = st.sampled_from([None, "data", "foreach"])
damages = st.sampled_from([None, None, None, "missing", "extra", "shape", "type", "none", "list"])


class Programs(RuleBasedStateMachine):
    """Draws one program and passes it to `tell` at the end."""

    api: str
    has_hooks = True
    forms: tuple[str, ...] = ()
    wrong_calls: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ("evaluate",)
    shapes: st.SearchStrategy[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.options: dict[str, Any] = {}
        self.num_pending = self.num_saved_optimizers = self.num_contexts = 0
        self.saved: list[str] = []
        self._only: int | None = None

    def tell(self, case: Case) -> None:
        """Receives the program; overridden by the caller."""

    def teardown(self) -> None:
        if self.calls:
            self.tell(Case(self.api, {**self.options, "api": self.api}, self.calls))

    def call(self, do: str, *, together: bool = False, **arguments: Any) -> None:
        said = {"do": do, **{name: value for name, value in arguments.items() if value is not None}}
        if self._only is not None and not together:
            said["on"], self._only = self._only, None
        self.calls.append(said)

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.options = data.draw(self.shapes)
        kinds = self.options["kinds"] or []
        if {"complex", "both"} & set(kinds) and self.options["steps_by"] == "fused":
            # PyTorch's fused optimizers refuse complex parameters.
            self.options["steps_by"] = "foreach"
        if self.api == "composed" and self.options["optimizer"] == "sgd" and self.options["steps_by"] == "fused":
            # DTensor of torch 2.13 has no fused SGD.
            self.options["steps_by"] = "foreach"
        if not self.has_hooks:
            self.options["hook"] = False
        if "dtypes" in kinds:
            # With a `param_dtype` a bfloat16 parameter computes in another dtype than in one process.
            self.options.update(mixed=False, begins="double")
        if self.options["mixed"]:
            self.options.pop("begins", None)
        else:
            self.options.pop("full_in_eval", None)

    # --- training ---

    @rule(batch=batches, to_none=flags, skip=parts, evaluations=st.sets(st.integers(0, 4), max_size=2))
    def train(self, batch: int, to_none: bool, skip: int | None, evaluations: set[int]) -> None:
        """A step, with evaluations at any place in it."""
        arguments: list[dict[str, Any]] = [
            {"do": "zero_grad", "together": True, "to_none": to_none, "of_model": False},
            {"do": "forward", "batch": batch, "skip": skip},
            {"do": "backward", "which": "all"},
            {"do": "step", "together": True},
        ]
        for place, of_call in enumerate([*arguments, None]):
            if place in evaluations:
                self.call(self.evaluations[batch % len(self.evaluations)], batch=batch)
            if of_call is not None:
                self.call(**of_call)
        self.num_pending = 0

    @rule(batch=batches, drops=flags, of_model=flags, to_none=flags, evaluates=flags)
    def accumulate(self, batch: int, drops: bool, of_model: bool, to_none: bool, evaluates: bool) -> None:
        """Micro-batches, of which only the last one reduces. `drops`: the gradients of the first are discarded."""
        self.begin_accumulating()
        for number in range(2):
            self.call("forward", batch=batch + number)
            self.call("backward", which="all")
            if drops and number == 0:
                self.call("zero_grad", together=True, to_none=to_none, of_model=of_model)
            if evaluates:
                self.call("evaluate", batch=batch)
        self.end_accumulating()
        self.call("forward", batch=batch)
        self.call("backward", which="all")
        self.call("step", together=True)
        self.num_pending = 0

    def begin_accumulating(self) -> None:
        raise NotImplementedError

    def end_accumulating(self) -> None:
        raise NotImplementedError

    @rule(batch=batches, skip=parts, part=st.none() | parts)
    def forward(self, batch: int, skip: int | None, part: int | None) -> None:
        self.call("forward", batch=batch, skip=skip, part=part)
        self.num_pending += 1

    @precondition(lambda self: self.num_pending)
    @rule(which=st.sampled_from(["first", "last", "all"]))
    def backward(self, which: str) -> None:
        self.call("backward", which=which)
        self.num_pending = 0 if which == "all" else self.num_pending - 1

    @rule(batch=batches, part=st.none() | parts)
    def evaluate(self, batch: int, part: int | None) -> None:
        self.call("evaluate", batch=batch, part=part)

    @rule()
    def step(self) -> None:
        self.call("step", together=True)
        self.num_pending = 0

    @rule(to_none=flags, of_model=flags)
    def zero_grad(self, to_none: bool, of_model: bool) -> None:
        self.call("zero_grad", together=True, to_none=to_none, of_model=of_model)

    @rule(most=st.sampled_from([0.01, 1, 1e9]), norm=st.sampled_from([1, 2.0, "inf"]))
    def clip(self, most: float, norm: float | str) -> None:
        if norm == "inf" and self.api == "composed" and "expand" in (self.options["kinds"] or []):
            # One rank has no elements of that parameter, and PyTorch refuses the maximum of an empty tensor.
            norm = 2.0
        self.call("clip", most=most, norm=norm)

    @rule(how=edits, of_model=flags)
    def edit(self, how: str | None, of_model: bool) -> None:
        self.call("edit", together=True, how=how, of_model=of_model)

    @rule(batch=batches, evaluates=flags)
    def new_optimizer(self, batch: int, evaluates: bool) -> None:
        if evaluates:
            self.call(self.evaluations[-1], batch=batch)
        self.call("new_optimizer", together=True)

    @rule(train=flags)
    def mode(self, train: bool) -> None:
        self.call("mode", train=train)

    # --- saving ---

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        self.saved.append(data.draw(st.sampled_from(self.forms)))
        self.call("save", form=self.saved[-1])

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), strict=flags)
    def load(self, data: st.DataObject, strict: bool) -> None:
        index = data.draw(st.integers(0, len(self.saved) - 1))
        # Sometimes loads another form than the saved one. Such a load is strict, because a non-strict one would read
        # nothing.
        others = self.forms if self.api == "wrapped" else ("plain",)
        form = data.draw(st.sampled_from([None, None, None, *others]))
        strict = strict or form is not None or self.saved[index] == "local"
        # torch's functions accept some damaged state dicts, so only the project's own loads get them.
        damage = data.draw(damages) if self.api == "wrapped" or (form or self.saved[index]) == "plain" else None
        self.call("load", together=True, index=index, strict=strict, form=form, damage=damage)
        self.num_pending = 0

    @precondition(lambda self: len(self.forms) > 1)
    @rule(data=st.data())
    def save_optimizer(self, data: st.DataObject) -> None:
        forms = [form for form in self.forms if form != "plain"]
        self.call("save_optimizer", form=data.draw(st.sampled_from(forms)))
        self.num_saved_optimizers += 1

    @precondition(lambda self: self.num_saved_optimizers)
    @rule(index=st.integers(0, 3))
    def load_optimizer(self, index: int) -> None:
        self.call("load_optimizer", together=True, index=index)

    # --- wrong calls ---

    @rule(data=st.data())
    def wrong(self, data: st.DataObject) -> None:
        self.call("wrong", together=True, name=data.draw(st.sampled_from(self.wrong_calls)))

    @rule(batch=batches, bang=st.integers(0, NUM_BLOCKS - 1), evaluates=flags)
    def break_off(self, batch: int, bang: int, evaluates: bool) -> None:
        self.call("evaluate" if evaluates else "forward", together=True, batch=batch, bang=bang)

    @rule(given=st.sampled_from([3, "text", [1.0]]))
    def strange_input(self, given: object) -> None:
        self.call("strange_input", together=True, input=given)

    @rule()
    def backward_again(self) -> None:
        self.call("backward_again", together=True)

    @rule()
    def copy(self) -> None:
        self.call("copy", together=True)


class Wrapped(Programs):
    """Through ``FullyShardedDataParallel``."""

    api = "wrapped"
    forms = tuple(wrapped.FORMS)
    wrong_calls = tuple(WRONG_WRAPPED)
    shapes = st.fixed_dictionaries(
        {
            "kinds": st.none() | st.lists(st.sampled_from(FLAT_KINDS), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
            "steps_by": steps_by,
            "full_in_eval": flags,
            "hook": st.sampled_from([False, False, True]),
            "strategy": st.sampled_from(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
            "originals": flags,
            "nested": flags,
            "uses": st.sampled_from([1, 1, 2]),
            "prefetch": st.sampled_from(["pre", "post", "none"]),
            "forward_prefetch": flags,
            "offload": st.sampled_from([False, False, True]),
            "optimizer": st.sampled_from(["sgd", "adam"]),
            "mixed": st.sampled_from([False, False, True]),
            "replicas": st.sampled_from([None, None, None, 1, 2]),
        }
    )

    def begin_accumulating(self) -> None:
        self.call("enter", what="no_sync")

    def end_accumulating(self) -> None:
        self.call("leave")

    @rule(batch=batches, inner=flags, records=flags)
    def evaluate_in_mode(self, batch: int, inner: bool, records: bool) -> None:
        """An evaluation in evaluation mode, or a step in it."""
        self.call("mode", train=False, inner=inner)
        if records:
            self.call("zero_grad", together=True, to_none=True, of_model=False)
            self.call("forward", batch=batch)
            self.call("backward", which="all")
            self.call("step", together=True)
        else:
            self.call("evaluate", batch=batch)
        self.call("mode", train=True)

    @rule()
    def no_sync(self) -> None:
        self.call("enter", what="no_sync")
        self.num_contexts += 1

    @rule(writeback=flags, rank0_only=flags, offload_to_cpu=flags, with_grads=flags)
    def summon(self, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
        options = {"rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu, "with_grads": with_grads}
        self.call("enter", what="summon", writeback=writeback, **options)
        self.num_contexts += 1

    @precondition(lambda self: self.num_contexts)
    @rule()
    def leave(self) -> None:
        self.call("leave")
        self.num_contexts -= 1

    @rule()
    def apply(self) -> None:
        self.call("apply", together=True)
        self.num_pending = 0


class Composed(Programs):
    """Through ``fully_shard``."""

    api = "composed"
    forms = tuple(composed.FORMS)
    wrong_calls = tuple(WRONG_COMPOSED)
    shapes = st.fixed_dictionaries(
        {
            "kinds": st.none() | st.lists(st.sampled_from(KINDS), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
            "steps_by": steps_by,
            "begins": st.sampled_from(["double", "double", "float"]),
            "frees": st.sampled_from([None, True, False]),
            "nested": flags,
            "uses": st.sampled_from([1, 1, 2]),
            "offload": st.sampled_from([False, False, True]),
            "optimizer": st.sampled_from(["sgd", "adam"]),
            "mixed": st.sampled_from([False, False, True]),
            "replicas": st.sampled_from([None, None, None, 1, 2]),
        }
    )

    evaluations = ("evaluate", "generate")

    def begin_accumulating(self) -> None:
        self.call("sync", value=False, recurse=True)

    def end_accumulating(self) -> None:
        self.call("sync", value=True, recurse=True)

    @rule(batch=batches)
    def generate(self, batch: int) -> None:
        self.call("generate", batch=batch)

    @precondition(lambda self: not self.options.get("mixed"))
    @rule(batch=batches, dtype=st.sampled_from(["double", "float"]), how=st.sampled_from(["method", "assign"]))
    def convert(self, batch: int, dtype: str, how: str) -> None:
        """Converts to another dtype after a step, when no gradient waits for its reduction."""
        if "dtypes" in (self.options["kinds"] or []) and dtype == "float":
            return
        self.call("sync", together=True, value=True)
        self.call("keep_after_backward", together=True, value=False)
        self.call("forward", batch=batch)
        self.call("backward", which="all")
        self.call("step", together=True)
        self.call("convert", together=True, dtype=dtype, how=how)
        self.num_pending = 0

    @rule(value=flags, part=parts, recurse=flags)
    def sync(self, value: bool, part: int | None, recurse: bool) -> None:
        self.call("sync", value=value, part=part, recurse=recurse)

    @rule(value=flags, part=parts, recurse=flags, do=st.sampled_from(["keep", "keep_after_backward"]))
    def keep(self, value: bool, part: int | None, recurse: bool, do: str) -> None:
        self.call(do, value=value, part=part, recurse=recurse)

    @rule(part=parts, later=flags)
    def unshard(self, part: int | None, later: bool) -> None:
        self.call("unshard", part=part, later=later)

    @rule()
    def wait(self) -> None:
        self.call("wait")

    @rule(part=parts)
    def reshard(self, part: int | None) -> None:
        self.call("reshard", part=part)

    @rule(part=parts, listed=st.lists(parts, max_size=3), when=st.sampled_from(["forward", "backward"]))
    def prefetch(self, part: int | None, listed: list[int | None], when: str) -> None:
        self.call("prefetch", part=part, parts=listed, when=when)


class _Apart(Programs):
    """Sometimes only one rank makes a call, or ranks leave out different blocks."""

    # A hook of the program issues its own collectives. gloo ends the process when their sizes differ between ranks.
    has_hooks = False

    @rule(rank=st.integers(0, 1))
    def alone(self, rank: int) -> None:
        """Makes the next suitable call on this rank only."""
        self._only = rank

    @rule(batch=batches, skips=st.tuples(parts, parts))
    def forward_by_branch(self, batch: int, skips: tuple[int | None, int | None]) -> None:
        self.call("forward", batch=batch, skip=list(skips))
        self.num_pending += 1


class WrappedApart(_Apart, Wrapped):
    pass


class ComposedApart(_Apart, Composed):
    # The other forms use torch's functions over the default group, whose time limit is long.
    forms = ("plain",)


MACHINES: dict[tuple[str, bool], type[Programs]] = {
    ("wrapped", False): Wrapped,
    ("composed", False): Composed,
    ("wrapped", True): WrappedApart,
    ("composed", True): ComposedApart,
}


def drawn(number: int, api: str, seed: int, *, is_apart: bool = False) -> list[Case]:
    """Draws different programs for an API. The same seed gives the same programs.

    Args:
        number: number of programs.
        api: the API.
        seed: seed of the first batch.
        is_apart: whether sometimes only one rank makes a call.
    """
    cases: list[Case] = []
    for part in itertools.count():
        # Hypothesis prefers variations of what it has drawn. A new run draws different programs.
        cases += [case for case in _some(BATCH, api, 10_000 * seed + part, is_apart) if case not in cases]
        if len(cases) >= number:
            break
    return cases[:number]


def _some(number: int, api: str, seed: int, is_apart: bool) -> list[Case]:
    cases: list[Case] = []
    machine: Any = type("Machine", (MACHINES[api, is_apart],), {"tell": lambda self, case: cases.append(case)})
    chosen = settings(
        max_examples=number,
        stateful_step_count=NUM_CALLS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seeded(seed)(machine), settings=chosen)
    return cases
