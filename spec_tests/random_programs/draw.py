"""Draws random programs with hypothesis. Only its generator is used: ``judge.py`` runs them and reduces failing ones.

All programs have the same description, and `drawn` draws all kinds of them. The kinds differ in what is random:

===========  ==========================================================================================================
kind         what is random
===========  ==========================================================================================================
``loops``    the model, and the options of ordinary training loops
``resumed``  the same, and optimizers, hooks of the user, and a state that is saved and loaded
``races``    a loop, and what the user does at the same time; for the simulated device
``calls``    the calls, in correct and in wrong order, for a small model whose gradients share memory
``apart``    the same; sometimes only one rank makes a call, or ranks leave out different parts
===========  ==========================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from spec_tests.random_programs.description import (
    CONTAINERS,
    SHARED_LEAVES,
    Call,
    Description,
    Node,
    forms_of,
    is_per_parameter,
    legal,
    walk,
)
from spec_tests.random_programs.wrong import WRONG_COMPOSED, WRONG_WRAPPED

__all__ = ["FLAT_KINDS", "KINDS", "SHAPES", "collected", "drawn", "loops", "of_blocks"]

T = TypeVar("T")

PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
LOOP_LEAVES = ("linear", "mlp", "embedding", "norm", "own", "idle", "unused", "one_sided")
# By name: number of ranks, and of replicas.
SHAPES = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (4, 2)}
SWITCHES = ("keep_after_backward", "keep_after_forward", "free_after_forward", "divide", "unused", "no_gather")
BY_HAND = ("unshard", "async", "async_and_wait", "all", "in_vain", "between")
EDITS = ("in_place", "new_data", "write", "read", "read_on_cpu", "gradients")

flags = st.booleans()
often = st.sampled_from([True, True, False])
seldom = st.sampled_from([False, False, False, False, True])


def drawn(kind: str, num: int, number: int, api: str, shape: str = "2") -> list[Description]:
    """``num`` programs of this kind; the same ``number`` (seed) gives the same ones."""
    if kind not in ("calls", "apart"):
        return collected(STRATEGIES[kind](shape, api), num, number)
    programs: list[Description] = []
    for part in itertools.count():
        # Hypothesis prefers variations of what it has drawn. A new run draws different programs.
        some = collected(_programs(api, is_apart=kind == "apart"), 10, 10_000 * number + part)
        programs += [program for program in some if program not in programs]
        if len(programs) >= num:
            break
    return programs[:num]


def collected(strategy: st.SearchStrategy[T], num: int, number: int) -> list[T]:
    """``num`` examples; the same ``number`` (seed) gives the same ones."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=num, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found


# --- training loops ---


@st.composite
def _nodes(draw: st.DrawFn, depth: int) -> Node:
    is_leaf = depth == 0 or draw(st.booleans())
    children: tuple[Node, ...] = ()
    if not is_leaf:
        children = tuple(draw(st.lists(_nodes(depth - 1), min_size=1, max_size=3)))
    return Node(
        kind=draw(st.sampled_from(LOOP_LEAVES if is_leaf else CONTAINERS[:1] * 3 + CONTAINERS)),
        size=draw(st.integers(0, 7)),
        unit=draw(st.booleans()),
        frozen=draw(seldom),
        times=draw(st.sampled_from([1, 1, 1, 2, 3])),
        checkpoint=draw(st.sampled_from(["", "", "", "nonreentrant", "reentrant"])),
        returns=draw(st.sampled_from(["tensor", "tensor", "tuple", "dict", "nested"])),
        keywords=draw(seldom),
        every=2 if draw(st.integers(0, 9)) == 9 else 1,
        same_as=draw(st.sampled_from([-1, -1, -1, 0, 1, 2])),
        strategy=draw(st.sampled_from(["", "", "", *PLAIN])),
        children=children,
    )


@st.composite
def loops(draw: st.DrawFn, shape: str, api: str) -> Description:
    """Training loops for this shape of ranks and this front end."""
    num_ranks, _ = SHAPES[shape]
    micro_batches = draw(
        st.sampled_from([(True,), (True,), (True,), (False, True), (True, True), (False, False, True)])
    )
    if draw(seldom):
        micro_batches = draw(
            st.sampled_from([(True, False, True), (False, True, False, True), (True, False, False, True)])
        )
    root = Node("chain", children=tuple(draw(st.lists(_nodes(2), min_size=1, max_size=4))))
    pair = st.tuples(st.integers(0, 5), st.integers(1, 6))
    program = Description(
        model=root,
        num_ranks=num_ranks,
        api=api,
        width=draw(st.integers(1, 5)),
        strategy=draw(st.sampled_from([*PLAIN, *PLAIN, *HYBRID])),
        num_replicas=draw(st.sampled_from([1, 2, num_ranks])),
        originals=draw(st.booleans()),
        precision=draw(st.sampled_from(["full", "full", "full", "low", "low_summed_full", "full_summed_low"])),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        forward_prefetch=draw(st.booleans()),
        limits=draw(often),
        offload=draw(seldom),
        by_policy=draw(st.sampled_from(["", "custom"])),
        ties=tuple(draw(st.lists(pair, max_size=2))),
        steps=draw(st.sampled_from([2, 2, 3])),
        micro_batches=micro_batches,
        forwards=draw(st.sampled_from([1, 1, 1, 2])),
        samples=draw(st.integers(1, 3)),
        momentum=draw(st.booleans()),
        clears=draw(often),
        evaluates=draw(st.sampled_from(["", "", "after", "between", "forgotten"])),
        clips=draw(seldom),
        bomb=draw(st.sampled_from(["", "", "", "", "forward", "backward"])),
        bomb_at=draw(st.integers(0, 5)),
        edits=draw(st.sampled_from(["", "", "", "", "write"])),
        saves=draw(st.sampled_from(["", "", "", "", "full"])),
        tracks_input=draw(seldom),
        apart=draw(st.sampled_from([-1, -1, -1, 0, 1, 2])),
        seed=draw(st.integers(0, 99)),
    )
    return legal(program)


def _resumed(shape: str, api: str) -> st.SearchStrategy[Description]:
    return st.builds(
        lambda d, adam, hook, form: legal(replace(d, adam=adam, hook=hook, resumes=form)),
        loops(shape, api),
        adam=st.booleans(),
        hook=st.sampled_from(["", "", "communication", "accumulated", "backward"]),
        form=st.sampled_from(forms_of(api)),
    )


# --- races ---


@st.composite
def _races(draw: st.DrawFn, shape: str, api: str) -> Description:
    num_ranks, num_replicas = SHAPES[shape]
    program = draw(loops(shape, api))
    program = replace(
        program,
        # Without modules that read the batch on the CPU, which would stop the CPU and order everything in each forward.
        model=_without_questions(program.model),
        strategy=draw(st.sampled_from(HYBRID if num_replicas > 1 else (*PLAIN, *PLAIN, *HYBRID))),
        num_replicas=num_replicas if num_replicas > 1 else draw(st.sampled_from([1, num_ranks])),
        steps=2,
        offload=draw(st.sampled_from([False, False, True])),
        rank=draw(st.sampled_from([0, 0, num_ranks - 1])),
        batches=draw(st.sampled_from(["device", "device", "plain", "pinned"])),
        reads=draw(seldom),
        separate=draw(seldom),
        stepping=draw(st.sampled_from(["", "", "", "event", "in_backward"])),
        adam=draw(seldom),
        scales=draw(seldom),
        hook=draw(st.sampled_from(["", "", "", "plain", "async", "low"])),
        edits=draw(st.sampled_from(["", "", "", *EDITS])),
        saves=draw(st.sampled_from(["", "", "", "full", "sharded"])),
        elsewhere=draw(seldom),
        aside=draw(seldom),
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
    return legal(program)


def _without_questions(node: Node) -> Node:
    kind = "own" if node.kind == "one_sided" else node.kind
    return replace(node, kind=kind, children=tuple(map(_without_questions, node.children)))


STRATEGIES: dict[str, Callable[[str, str], st.SearchStrategy[Description]]] = {
    "loops": loops,
    "resumed": _resumed,
    "races": _races,
}

# --- calls in any order ---

NUM_RULES, NUM_BLOCKS, FIRST_BLOCK = 14, 3, 2
KINDS = ("mlp", *SHARED_LEAVES)
# A flat parameter has one dtype.
FLAT_KINDS = tuple(kind for kind in KINDS if kind not in ("both", "dtypes"))
BLOCKS = st.integers(FIRST_BLOCK, FIRST_BLOCK + NUM_BLOCKS - 1)
PARTS = st.none() | BLOCKS
BATCHES = st.integers(0, 3)
DAMAGES = st.sampled_from([None, None, None, "missing", "extra", "shape", "type", "none", "list"])


def of_blocks(kinds: tuple[str, ...] = (), uses: int = 1, *, nested: bool = False, **options: Any) -> Description:
    """A program without calls, for a small model of three blocks. Each is a unit, the middle one can contain another.

    Sizes are small and odd, so that most parameters are split with padding.
    """
    blocks = [Node(kind, size=5, unit=True, times=uses) for kind in kinds or ("mlp",) * NUM_BLOCKS]
    if nested:
        inner = replace(blocks[1], unit=False, times=1)
        blocks[1] = Node("chain", unit=True, times=uses, children=(Node("mlp", size=5, unit=True), inner))
    model = Node("chain", children=(Node("counter"), Node("linear"), *blocks, Node("linear")))
    usual = {"steps": 0, "dtype": "double", "width": 4, "samples": 3, "tracks_input": True, "by_policy": "class"}
    options = {**usual, "seed": 17, "momentum": options.get("steps_by") != "fused", **options}
    return legal(Description(model, **options))


@st.composite
def _programs(draw: st.DrawFn, api: str, *, is_apart: bool) -> Description:
    by_function = api == "fully_shard"
    kinds = draw(st.just(()) | st.tuples(*[st.sampled_from(KINDS if by_function else FLAT_KINDS)] * NUM_BLOCKS))
    steps_by = draw(st.sampled_from(["", "foreach", "foreach", "fused"]))
    adam = draw(flags)
    is_mixed = draw(st.sampled_from([False, False, True])) and "dtypes" not in kinds
    if steps_by == "fused" and ({"complex", "both"} & set(kinds) or (by_function and not adam)):
        # PyTorch's fused optimizers refuse complex parameters, and DTensor of torch 2.13 has no fused SGD.
        steps_by = "foreach"
    replicas = draw(st.sampled_from([None, None, None, 1, 2]))
    strategy = draw(st.sampled_from(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]))
    frees = draw(flags)
    if replicas is not None and (by_function or strategy != "NO_SHARD"):
        strategy = "_HYBRID_SHARD_ZERO2" if strategy == "SHARD_GRAD_OP" else "HYBRID_SHARD"
    # A hook of the program issues its own collectives. gloo ends the process when their sizes differ between ranks.
    has_hook = draw(st.sampled_from([False, False, True])) and not (is_apart or by_function)
    # With a `param_dtype` a bfloat16 parameter computes in another dtype than in one process.
    is_float = draw(seldom) and by_function and not is_mixed and "dtypes" not in kinds
    d = of_blocks(
        kinds,
        draw(st.sampled_from([1, 1, 2])),
        nested=draw(flags),
        api=api,
        steps_by=steps_by,
        adam=adam,
        precision="single" if is_mixed else "full",
        dtype="float" if is_float else "double",
        full_in_eval=draw(flags) and is_mixed,
        strategy=strategy,
        frees=frees,
        num_replicas=replicas or 1,
        by_mesh=True,
        hook="in_place" if has_hook and replicas is None else "",
        originals=draw(flags),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        forward_prefetch=draw(flags),
        offload=draw(st.sampled_from([False, False, True])),
    )
    calls = (_FunctionCalls if by_function else _WrapperCalls)(draw, d, is_apart)
    return replace(d, calls=tuple(calls.drawn()))


class _Calls:
    """Draws the calls of one program.

    It tracks only the state that it needs to draw useful programs: whether a loss waits for its backward, whether a
    context is open, and what was saved. Most rules can be drawn at any time, so the order is often wrong. `train` draws
    a whole step at once, so that many calls are also in the correct order.
    """

    rules = (
        "train accumulate forward backward evaluate step zero_grad clip edit new_optimizer mode save load "
        "save_optimizer load_optimizer wrong break_off strange_input backward_again copy"
    )
    evaluations = ("evaluate",)
    wrong_calls: tuple[str, ...] = ()

    def __init__(self, draw: st.DrawFn, d: Description, is_apart: bool) -> None:
        self.draw, self.d, self.is_apart = draw, d, is_apart
        self.calls: list[Call] = []
        self.forms = forms_of(d.api)
        if is_apart and is_per_parameter(d):
            # The other forms use torch's functions over the default group, whose time limit is long.
            self.forms = ("own",)
        self.num_pending = self.num_saved_optimizers = self.num_contexts = 0
        self.saved: list[str] = []
        self._only: int | None = None

    def drawn(self) -> list[Call]:
        """The calls."""
        rules = (self.rules + (" alone forward_by_branch" if self.is_apart else "")).split()
        # Some rules are turned off, different ones for each program. So programs differ in kind, not only in order.
        off = self.draw(st.sets(st.sampled_from(rules)))
        possible = [rule for rule in rules if rule not in off] or rules
        for _ in range(NUM_RULES):
            getattr(self, self.draw(st.sampled_from(possible)))()
        return self.calls

    def call(self, do: str, *, together: bool = False, **arguments: Any) -> None:
        said = {"do": do, **{name: value for name, value in arguments.items() if value is not None}}
        if self._only is not None and not together:
            said["on"], self._only = self._only, None
        self.calls.append(said)

    def flag(self) -> bool:
        return self.draw(flags)

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    # --- training ---

    def train(self) -> None:
        """A step, with evaluations at any place in it."""
        batch = self.draw(BATCHES)
        evaluations = self.draw(st.sets(st.integers(0, 4), max_size=2))
        arguments: list[dict[str, Any]] = [
            {"do": "zero_grad", "together": True, "to_none": self.flag(), "of_model": False},
            {"do": "forward", "batch": batch, "skip": self.draw(PARTS)},
            {"do": "backward", "which": "all"},
            {"do": "step", "together": True},
        ]
        for place, of_call in enumerate([*arguments, None]):
            if place in evaluations:
                self.call(self.evaluations[batch % len(self.evaluations)], batch=batch)
            if of_call is not None:
                self.call(**of_call)
        self.num_pending = 0

    def accumulate(self) -> None:
        """Micro-batches, of which only the last one reduces. The gradients of the first can be discarded."""
        batch, drops, of_model, to_none, evaluates = self.draw(BATCHES), *(self.flag() for _ in range(4))
        self.reduces(False)
        for number in range(2):
            self.call("forward", batch=batch + number)
            self.call("backward", which="all")
            if drops and number == 0:
                self.call("zero_grad", together=True, to_none=to_none, of_model=of_model)
            if evaluates:
                self.call("evaluate", batch=batch)
        self.reduces(True)
        self.call("forward", batch=batch)
        self.call("backward", which="all")
        self.call("step", together=True)
        self.num_pending = 0

    def reduces(self, value: bool) -> None:
        raise NotImplementedError

    def forward(self) -> None:
        self.call("forward", batch=self.draw(BATCHES), skip=self.draw(PARTS), part=self.draw(st.none() | PARTS))
        self.num_pending += 1

    def forward_by_branch(self) -> None:
        self.call("forward", batch=self.draw(BATCHES), skip=[self.draw(PARTS), self.draw(PARTS)])
        self.num_pending += 1

    def alone(self) -> None:
        """The next suitable call is made on this rank only."""
        self._only = self.one_of(0, 1)

    def backward(self) -> None:
        if self.num_pending:
            which = self.one_of("first", "last", "all")
            self.call("backward", which=which)
            self.num_pending = 0 if which == "all" else self.num_pending - 1

    def evaluate(self) -> None:
        self.call("evaluate", batch=self.draw(BATCHES), part=self.draw(st.none() | PARTS))

    def step(self) -> None:
        self.call("step", together=True)
        self.num_pending = 0

    def zero_grad(self) -> None:
        self.call("zero_grad", together=True, to_none=self.flag(), of_model=self.flag())

    def clip(self) -> None:
        # One rank has no elements of a parameter of one row, and PyTorch refuses the maximum of an empty tensor.
        norms = (1, 2.0) if is_per_parameter(self.d) and self._has("expand") else (1, 2.0, "inf")
        self.call("clip", most=self.one_of(0.01, 1, 1e9), norm=self.one_of(*norms))

    def _has(self, kind: str) -> bool:
        return any(node.kind == kind for node, _ in walk(self.d.model))

    def edit(self) -> None:
        self.call("edit", together=True, how=self.one_of(None, "data", "foreach"), of_model=self.flag())

    def new_optimizer(self) -> None:
        if self.flag():
            self.call(self.evaluations[-1], batch=self.draw(BATCHES))
        self.call("new_optimizer", together=True)

    def mode(self) -> None:
        self.call("mode", train=self.flag())

    # --- saving ---

    def save(self) -> None:
        self.saved.append(self.one_of(*self.forms))
        self.call("save", form=self.saved[-1])

    def load(self) -> None:
        if not self.saved:
            return
        index = self.draw(st.integers(0, len(self.saved) - 1))
        # Sometimes loads another form than the saved one. Such a load is strict, because a non-strict one would read
        # nothing.
        by_function = is_per_parameter(self.d)
        form = self.one_of(None, None, None, *(("own",) if by_function else self.forms))
        strict = self.flag() or form is not None or self.saved[index] == "local"
        # torch's functions accept some damaged state dicts, so only the project's own loads get them.
        damage = self.draw(DAMAGES) if not by_function or (form or self.saved[index]) == "own" else None
        self.call("load", together=True, index=index, strict=strict, form=form, damage=damage)
        self.num_pending = 0

    def save_optimizer(self) -> None:
        forms = [form for form in self.forms if form != "own"]
        if forms:
            self.call("save_optimizer", form=self.one_of(*forms))
            self.num_saved_optimizers += 1

    def load_optimizer(self) -> None:
        if self.num_saved_optimizers:
            self.call("load_optimizer", together=True, index=self.draw(st.integers(0, 3)))

    # --- wrong calls ---

    def wrong(self) -> None:
        self.call("wrong", together=True, name=self.one_of(*self.wrong_calls))

    def break_off(self) -> None:
        do = "evaluate" if self.flag() else "forward"
        self.call(do, together=True, batch=self.draw(BATCHES), bang=self.draw(BLOCKS))

    def strange_input(self) -> None:
        self.call("strange_input", together=True, input=self.one_of(3, "text", [1.0]))

    def backward_again(self) -> None:
        self.call("backward_again", together=True)

    def copy(self) -> None:
        self.call("copy", together=True)


class _WrapperCalls(_Calls):
    """Through ``FullyShardedDataParallel``."""

    rules = _Calls.rules + " evaluate_in_mode no_sync summon leave apply"
    wrong_calls = tuple(WRONG_WRAPPED)

    def reduces(self, value: bool) -> None:
        if value:
            self.call("leave")
        else:
            self.call("enter", what="no_sync")

    def evaluate_in_mode(self) -> None:
        """An evaluation in evaluation mode, or a step in it."""
        batch = self.draw(BATCHES)
        self.call("mode", train=False, inner=self.flag())
        if self.flag():
            self.call("zero_grad", together=True, to_none=True, of_model=False)
            self.call("forward", batch=batch)
            self.call("backward", which="all")
            self.call("step", together=True)
        else:
            self.call("evaluate", batch=batch)
        self.call("mode", train=True)

    def no_sync(self) -> None:
        self.call("enter", what="no_sync")
        self.num_contexts += 1

    def summon(self) -> None:
        options = {name: self.flag() for name in ("writeback", "rank0_only", "offload_to_cpu", "with_grads")}
        self.call("enter", what="summon", **options)
        self.num_contexts += 1

    def leave(self) -> None:
        if self.num_contexts:
            self.call("leave")
            self.num_contexts -= 1

    def apply(self) -> None:
        self.call("apply", together=True)
        self.num_pending = 0


class _FunctionCalls(_Calls):
    """Through ``fully_shard``."""

    rules = _Calls.rules + " generate convert sync keep unshard wait reshard prefetch"
    evaluations = ("evaluate", "generate")
    wrong_calls = tuple(WRONG_COMPOSED)

    def reduces(self, value: bool) -> None:
        self.call("sync", value=value, recurse=True)

    def generate(self) -> None:
        self.call("generate", batch=self.draw(BATCHES))

    def convert(self) -> None:
        """Converts to another dtype after a step, when no gradient waits for its reduction."""
        dtype, how = self.one_of("double", "float"), self.one_of("method", "assign")
        if self.d.precision != "full" or (dtype == "float" and self._has("dtypes")):
            return
        self.call("sync", together=True, value=True)
        self.call("keep_after_backward", together=True, value=False)
        self.call("forward", batch=self.draw(BATCHES))
        self.call("backward", which="all")
        self.call("step", together=True)
        self.call("convert", together=True, dtype=dtype, how=how)
        self.num_pending = 0

    def sync(self) -> None:
        self.call("sync", value=self.flag(), part=self.draw(PARTS), recurse=self.flag())

    def keep(self) -> None:
        do = self.one_of("keep", "keep_after_backward")
        self.call(do, value=self.flag(), part=self.draw(PARTS), recurse=self.flag())

    def unshard(self) -> None:
        self.call("unshard", part=self.draw(PARTS), later=self.flag())

    def wait(self) -> None:
        self.call("wait")

    def reshard(self) -> None:
        self.call("reshard", part=self.draw(PARTS))

    def prefetch(self) -> None:
        listed = self.draw(st.lists(PARTS, max_size=3))
        self.call("prefetch", part=self.draw(PARTS), parts=listed, when=self.one_of("forward", "backward"))
