"""Draws random programs with hypothesis. Only its generator is used: ``judge.py`` runs them and reduces failing ones.

All programs have the same description, and `drawn` draws all kinds of them. The kinds differ in what is random:

===========  ==========================================================================================================
kind         what is random
===========  ==========================================================================================================
``loops``    the model, and the options of ordinary training loops; some end with a state that is saved and loaded
``races``    a loop, and what the user does at the same time; for the simulated device
``calls``    the calls, in correct and in wrong order, for a small model whose gradients share memory
``apart``    the same; sometimes only one rank makes a call, or ranks leave out different parts
===========  ==========================================================================================================
"""

from __future__ import annotations

import itertools
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
    legal,
)
from spec_tests.random_programs.wrong import WRONG

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


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of these values; a value that is given several times is more likely."""
    return st.sampled_from(values)


def drawn(kind: str, num: int, number: int, api: str, shape: str = "2") -> list[Description]:
    """``num`` programs of this kind; the same ``number`` (seed) gives the same ones."""
    if kind in ("loops", "races"):
        return collected((loops if kind == "loops" else _races)(shape, api), num, number)
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

# The options of a node, except its kind and its children.
NODE: dict[str, st.SearchStrategy[Any]] = {
    "size": st.integers(0, 7),
    "unit": flags,
    "frozen": seldom,
    "times": one_of(1, 1, 1, 2, 3),
    "checkpoint": one_of("", "", "", "nonreentrant", "reentrant"),
    "returns": one_of("tensor", "tensor", "tuple", "dict", "nested"),
    "keywords": seldom,
    "every": one_of(*[1] * 9, 2),
    "same_as": one_of(-1, -1, -1, 0, 1, 2),
    "strategy": one_of("", "", "", *PLAIN),
}


def _nodes(depth: int) -> st.SearchStrategy[Node]:
    leaves = st.builds(Node, kind=one_of(*LOOP_LEAVES), **NODE)
    if depth == 0:
        return leaves
    children = st.lists(_nodes(depth - 1), min_size=1, max_size=3).map(tuple)
    return leaves | st.builds(Node, kind=one_of(*CONTAINERS[:1] * 3, *CONTAINERS), children=children, **NODE)


def _loop_options(shape: str, api: str) -> dict[str, st.SearchStrategy[Any]]:
    num_ranks, _ = SHAPES[shape]
    usual = one_of((True,), (True,), (True,), (False, True), (True, True), (False, False, True))
    long = one_of((True, False, True), (False, True, False, True), (True, False, False, True))
    children = st.lists(_nodes(2), min_size=1, max_size=4).map(tuple)
    return {
        "model": st.builds(Node, kind=st.just("chain"), children=children),
        "num_ranks": st.just(num_ranks),
        "api": st.just(api),
        "width": st.integers(1, 5),
        "strategy": one_of(*PLAIN, *PLAIN, *HYBRID),
        "num_replicas": one_of(1, 2, num_ranks),
        "originals": flags,
        "precision": one_of("full", "full", "full", "low", "low_summed_full", "full_summed_low"),
        "backward_prefetch": one_of("BACKWARD_PRE", "BACKWARD_POST", ""),
        "forward_prefetch": flags,
        "limits": often,
        "offload": seldom,
        "ties": one_of(0, 0, 1, 2),
        "steps": one_of(2, 2, 3),
        "micro_batches": seldom.flatmap(lambda is_long: long if is_long else usual),
        "forwards": one_of(1, 1, 1, 2),
        "samples": st.integers(1, 3),
        "momentum": flags,
        "adam": seldom,
        "hook": one_of("", "", "", "", "communication", "accumulated", "backward"),
        "resumes": one_of(*[""] * 10, *forms_of(api)),
        "clears": often,
        "evaluates": one_of("", "", "after", "between", "forgotten"),
        "clips": seldom,
        "bomb": one_of("", "", "", "", "forward", "backward"),
        "bomb_at": st.integers(0, 5),
        "edits": one_of("", "", "", "", "write"),
        "saves": one_of("", "", "", "", "full"),
        "tracks_input": seldom,
        "apart": one_of(-1, -1, -1, 0, 1, 2),
        "seed": st.integers(0, 99),
    }


def loops(shape: str, api: str, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Description]:
    """Training loops for this shape of ranks and this front end; ``others`` replaces or adds options."""
    return st.builds(Description, **{**_loop_options(shape, api), **others}).map(legal)


# --- races ---


def _races(shape: str, api: str) -> st.SearchStrategy[Description]:
    num_ranks, num_replicas = SHAPES[shape]
    program = loops(
        shape,
        api,
        strategy=one_of(*HYBRID) if num_replicas > 1 else one_of(*PLAIN, *PLAIN, *HYBRID),
        num_replicas=st.just(num_replicas) if num_replicas > 1 else one_of(1, num_ranks),
        steps=st.just(2),
        offload=one_of(False, False, True),
        rank=one_of(0, 0, num_ranks - 1),
        batches=one_of("device", "device", "plain", "pinned"),
        reads=seldom,
        separate=seldom,
        stepping=one_of("", "", "", "event", "in_backward"),
        resumes=st.just(""),
        scales=seldom,
        hook=one_of("", "", "", "plain", "async", "low"),
        edits=one_of("", "", "", *EDITS),
        saves=one_of("", "", "", "full", "sharded"),
        elsewhere=seldom,
        aside=seldom,
        pins=often,
        among=one_of(0, 0, 0, 1, 2),
        ahead=one_of(0, 0, 1, 2),
        by_hand=one_of("", "", *BY_HAND),
        switches=st.sets(st.sampled_from(SWITCHES), max_size=2).map(lambda names: tuple(sorted(names))),
        late=flags,
        sums_late=often,
        goes_on=flags,
        resets=flags,
    )
    # Without modules that read the batch on the CPU, which would stop the CPU and order everything in each forward.
    return program.map(lambda d: legal(replace(d, model=_without_questions(d.model))))


def _without_questions(node: Node) -> Node:
    kind = "own" if node.kind == "one_sided" else node.kind
    return replace(node, kind=kind, children=tuple(map(_without_questions, node.children)))


# --- calls in any order ---

NUM_RULES, NUM_BLOCKS, FIRST_BLOCK = 14, 3, 2
KINDS = ("mlp", *SHARED_LEAVES)
# A flat parameter has one dtype.
FLAT_KINDS = tuple(kind for kind in KINDS if kind not in ("both", "dtypes"))
BLOCKS = st.integers(FIRST_BLOCK, FIRST_BLOCK + NUM_BLOCKS - 1)
PARTS = st.none() | BLOCKS
FEW_PARTS = st.none() | PARTS
BATCHES = st.integers(0, 3)


def of_blocks(kinds: tuple[str, ...] = (), uses: int = 1, *, nested: bool = False, **options: Any) -> Description:
    """A program without calls, for a small model of three blocks. Each is a unit, the middle one can contain another.

    Sizes are small and odd, so that most parameters are split with padding.
    """
    blocks = [Node(kind, size=5, unit=True, times=uses) for kind in kinds or ("mlp",) * NUM_BLOCKS]
    if nested:
        inner = replace(blocks[1], unit=False, times=1)
        blocks[1] = Node("chain", unit=True, times=uses, children=(Node("mlp", size=5, unit=True), inner))
    model = Node("chain", children=(Node("counter"), Node("linear"), *blocks, Node("linear")))
    usual = {"steps": 0, "dtype": "double", "width": 4, "samples": 3, "tracks_input": True}
    options = {**usual, "seed": 17, "momentum": options.get("steps_by") != "fused", **options}
    return legal(Description(model, **options))


@st.composite
def _programs(draw: st.DrawFn, api: str, *, is_apart: bool) -> Description:
    by_function = api == "fully_shard"
    kinds = draw(st.just(()) | st.tuples(*[one_of(*(KINDS if by_function else FLAT_KINDS))] * NUM_BLOCKS))
    steps_by = draw(one_of("", "foreach", "foreach", "fused"))
    adam = draw(flags)
    is_mixed = draw(one_of(False, False, True)) and "dtypes" not in kinds
    if steps_by == "fused" and ({"complex", "both"} & set(kinds) or (by_function and not adam)):
        # PyTorch's fused optimizers refuse complex parameters, and DTensor of torch 2.13 has no fused SGD.
        steps_by = "foreach"
    replicas = draw(one_of(None, None, None, 1, 2))
    strategy = draw(one_of("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    if replicas is not None and (by_function or strategy != "NO_SHARD"):
        strategy = "_HYBRID_SHARD_ZERO2" if strategy == "SHARD_GRAD_OP" else "HYBRID_SHARD"
    # A hook of the program issues its own collectives. gloo ends the process when their sizes differ between ranks.
    has_hook = draw(one_of(False, False, True)) and not (is_apart or by_function)
    # With a `param_dtype` a bfloat16 parameter computes in another dtype than in one process.
    is_float = draw(seldom) and by_function and not is_mixed and "dtypes" not in kinds
    d = of_blocks(
        kinds,
        draw(one_of(1, 1, 2)),
        nested=draw(flags),
        api=api,
        steps_by=steps_by,
        adam=adam,
        precision="single" if is_mixed else "full",
        dtype="float" if is_float else "double",
        full_in_eval=draw(flags) and is_mixed,
        strategy=strategy,
        frees=draw(flags),
        num_replicas=replicas or 1,
        by_mesh=True,
        hook="in_place" if has_hook and replicas is None else "",
        originals=draw(flags),
        backward_prefetch=draw(one_of("BACKWARD_PRE", "BACKWARD_POST", "")),
        forward_prefetch=draw(flags),
        offload=draw(one_of(False, False, True)),
    )
    return replace(d, calls=tuple(_Calls(draw, d, is_apart).drawn()))


# The calls with arguments that do not depend on earlier calls.
SIMPLE_CALLS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "backward": {"which": one_of("first", "last", "all")},
    "backward_again": {},
    "copy": {},
    "edit": {"how": one_of(None, "data", "foreach"), "of_model": flags},
    "evaluate": {"batch": BATCHES, "part": FEW_PARTS},
    "forward": {"batch": BATCHES, "skip": PARTS, "part": FEW_PARTS},
    "load_optimizer": {"index": st.integers(0, 3)},
    "mode": {"train": flags},
    "step": {},
    "strange_input": {"input": one_of(3, "text", [1.0])},
    "zero_grad": {"to_none": flags, "of_model": flags},
}
OF_WRAPPER: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "apply": {},
    "leave": {},
    "wrong": {"line": one_of(*WRONG["wrapped"])},
}
_SWITCH = {"value": flags, "part": PARTS, "recurse": flags}
OF_FUNCTION: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "generate": {"batch": BATCHES},
    "keep": _SWITCH,
    "keep_after_backward": _SWITCH,
    "prefetch": {"part": PARTS, "parts": st.lists(PARTS, max_size=3), "when": one_of("forward", "backward")},
    "reshard": {"part": PARTS},
    "sync": _SWITCH,
    "unshard": {"part": PARTS, "later": flags},
    "wait": {},
    "wrong": {"line": one_of(*WRONG["fully_shard"])},
}
# The calls that no rank can make alone.
TOGETHER = (
    *("apply", "backward_again", "convert", "copy", "edit", "load", "load_optimizer", "new_optimizer"),
    *("step", "strange_input", "wrong", "zero_grad"),
)


class _Calls:
    """Draws the calls of one program.

    Most rules can be drawn at any time, so the order is often wrong. `train` draws a whole step at once, so that many
    calls are also in the correct order.
    """

    rules = ("train", "accumulate", "new_optimizer", "clip", "save", "load", "save_optimizer", "break_off")

    def __init__(self, draw: st.DrawFn, d: Description, is_apart: bool) -> None:
        self.draw, self.d = draw, d
        self.calls: list[Call] = []
        self.by_function = d.is_per_parameter
        self.simple = SIMPLE_CALLS | (OF_FUNCTION if self.by_function else OF_WRAPPER)
        own = ("convert",) if self.by_function else ("evaluate_in_mode", "no_sync", "summon")
        self.possible = [*self.rules, *self.simple, *own, *["alone", "forward_by_branch"] * is_apart]
        # The other forms use torch's functions over the default group, whose time limit is long.
        self.forms = ("own",) if is_apart and self.by_function else forms_of(d.api)
        self.saved: list[str] = []
        self._only: int | None = None

    def drawn(self) -> list[Call]:
        """The calls."""
        # Some rules are turned off, different ones for each program. So programs differ in kind, not only in order.
        off = self.draw(st.sets(st.sampled_from(self.possible)))
        possible = [rule for rule in self.possible if rule not in off] or self.possible
        for _ in range(NUM_RULES):
            rule = self.draw(st.sampled_from(possible))
            if rule in self.simple:
                self.call(rule, **{name: self.draw(values) for name, values in self.simple[rule].items()})
            else:
                getattr(self, rule)()
        return self.calls

    def call(self, do: str, **arguments: Any) -> None:
        said = {"do": do, **{name: value for name, value in arguments.items() if value is not None}}
        if self._only is not None and do not in TOGETHER and "bang" not in said:
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
        places = self.draw(st.sets(st.integers(0, 4), max_size=2))
        evaluation = "generate" if self.by_function and batch % 2 else "evaluate"
        step: list[dict[str, Any]] = [
            {"do": "zero_grad", "to_none": self.flag(), "of_model": False},
            {"do": "forward", "batch": batch, "skip": self.draw(PARTS)},
            {"do": "backward", "which": "all"},
            {"do": "step"},
        ]
        for place in range(5):
            if place in places:
                self.call(evaluation, batch=batch)
            for call in step[place : place + 1]:
                self.call(**call)

    def step_on(self, batch: int) -> None:
        self.call("forward", batch=batch)
        self.call("backward", which="all")
        self.call("step")

    def accumulate(self) -> None:
        """Micro-batches, of which only the last one reduces. The gradients of the first can be discarded."""
        batch, drops, of_model, to_none, evaluates = self.draw(BATCHES), *(self.flag() for _ in range(4))
        self.no_sync()
        for number in range(2):
            self.call("forward", batch=batch + number)
            self.call("backward", which="all")
            if drops and number == 0:
                self.call("zero_grad", to_none=to_none, of_model=of_model)
            if evaluates:
                self.call("evaluate", batch=batch)
        if self.by_function:
            self.call("sync", value=True, recurse=True)
        else:
            self.call("leave")
        self.step_on(batch)

    def no_sync(self) -> None:
        if self.by_function:
            self.call("sync", value=False, recurse=True)
        else:
            self.call("enter", what="no_sync")

    def summon(self) -> None:
        options = {name: self.flag() for name in ("writeback", "rank0_only", "offload_to_cpu", "with_grads")}
        self.call("enter", what="summon", **options)

    def alone(self) -> None:
        """The next suitable call is made on this rank only."""
        self._only = self.one_of(0, 1)

    def forward_by_branch(self) -> None:
        self.call("forward", batch=self.draw(BATCHES), skip=[self.draw(PARTS), self.draw(PARTS)])

    def break_off(self) -> None:
        self.call(self.one_of("evaluate", "forward"), batch=self.draw(BATCHES), bang=self.draw(BLOCKS))

    def evaluate_in_mode(self) -> None:
        """An evaluation in evaluation mode, or a step in it."""
        batch = self.draw(BATCHES)
        self.call("mode", train=False, inner=self.flag())
        if self.flag():
            self.call("zero_grad", to_none=True, of_model=False)
            self.step_on(batch)
        else:
            self.call("evaluate", batch=batch)
        self.call("mode", train=True)

    def clip(self) -> None:
        # One rank has no elements of a parameter of one row, and PyTorch refuses the maximum of an empty tensor.
        norms = (1, 2.0) if self.by_function and self.d.has("expand") else (1, 2.0, "inf")
        self.call("clip", most=self.one_of(0.01, 1, 1e9), norm=self.one_of(*norms))

    def new_optimizer(self) -> None:
        if self.flag():
            self.call("generate" if self.by_function else "evaluate", batch=self.draw(BATCHES))
        self.call("new_optimizer")

    def convert(self) -> None:
        """Converts to another dtype after a step, when no gradient waits for its reduction."""
        dtype, how = self.one_of("double", "float"), self.one_of("method", "assign")
        if self.d.precision != "full" or (dtype == "float" and self.d.has("dtypes")):
            return
        self._only = None
        self.call("sync", value=True)
        self.call("keep_after_backward", value=False)
        self.step_on(self.draw(BATCHES))
        self.call("convert", dtype=dtype, how=how)

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
        form = self.one_of(None, None, None, *(("own",) if self.by_function else self.forms))
        strict = self.flag() or form is not None or self.saved[index] == "local"
        self.call("load", index=index, strict=strict, form=form)

    def save_optimizer(self) -> None:
        forms = [form for form in self.forms if form != "own"]
        if forms:
            self.call("save_optimizer", form=self.one_of(*forms))
