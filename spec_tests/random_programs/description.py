"""One random program as plain data.

A description is complete: two programs with equal descriptions do the same operations on the same numbers. It is a tree
of frozen dataclasses that contain numbers, strings, tuples and calls, so it can be compared, sent to a rank and
printed. The JSON form omits fields that have their default, so a minimal failure fits on one line::

    {"model":{"kind":"chain","children":[{"kind":"linear","unit":true}]},"num_ranks":2}

A program is a list of calls. A call is a dictionary: ``do`` is a method of the players in ``sides.py`` and
``reference.py``, the other entries are its arguments. ``on`` is the only rank that makes the call; without it, all
ranks do. Most programs are ordinary training loops, so the fields from ``steps`` to ``resumes`` stand for calls.
`calls_of` returns them, followed by the field ``calls``.

Not every combination is meaningful: a parameter cannot be tied across two units, and a flat parameter is trained
either completely or not at all. `legal` replaces a combination by the nearest meaningful one. Functions that draw or
reduce a description do not need these rules; they call `legal` afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

CONTAINERS = ("chain", "sum", "detach", "blind")
# Their parameters share the gradient's memory with their input, or have another layout or dtype.
SHARED_LEAVES = ("add", "view", "expand", "complex", "both", "dtypes")
LEAVES = ("linear", "mlp", "embedding", "norm", "own", "idle", "unused", "one_sided", "counter", *SHARED_LEAVES)
# Shapes of parameters that modules register themselves, by number: a scalar, one element, an odd row, a matrix, empty.
OWN_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 5), (0,), (7, 1, 3))


# The number of the batch of an evaluation in each step, which is larger than those of the micro-batches.
EVALUATION = 50
COMMUNICATION_HOOKS = ("communication", "in_place", "plain", "async", "low")

Call = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """One module, which maps ``(x, tokens)`` to a tensor like ``x``.

    Attributes:
        kind: one of `LEAVES` or `CONTAINERS`; ``modules.py`` describes their computations.
        size: hidden features, rows of an embedding, or a number in `OWN_SHAPES`.
        unit: whether it is a unit.
        frozen: whether its own parameters are frozen.
        times: number of calls by its parent, one after the other.
        checkpoint: whether its parent recomputes it in backward: ``"reentrant"`` or ``"nonreentrant"``.
        returns: the type of its output: a ``"tensor"``, or one inside a ``"tuple"``, ``"dict"`` or ``"nested"``.
        keywords: whether its parent calls it with keyword arguments.
        every: its parent calls it only in every n-th step, and skips it otherwise.
        same_as: for a leaf: the number of an earlier leaf, in traversal order from 0, whose module is used again.
        strategy: for a unit: a strategy that differs from that of the model.
        children: for a container: the modules inside.
    """

    kind: str = "linear"
    size: int = 3
    unit: bool = False
    frozen: bool = False
    times: int = 1
    checkpoint: str = ""
    returns: str = "tensor"
    keywords: bool = False
    every: int = 1
    same_as: int = -1
    strategy: str = ""
    children: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Description:
    """A random program.

    Attributes:
        model: the outermost module, always a unit.
        num_ranks: total number of ranks.
        api: the front end that shards; see ``front_ends.py``.
        width: number of features of inputs and outputs.
        strategy: name of a sharding strategy.
        num_replicas: with a hybrid strategy, the number of replicas; must divide ``num_ranks``.
        frees: with a hybrid strategy, whether the root is resharded after forward, too (``fully_shard``).
        by_mesh: with a hybrid strategy, whether the wrapper gets a device mesh instead of two process groups.
        originals: ``use_orig_params``.
        precision: a name in ``front_ends.PRECISIONS``.
        dtype: of the model: ``"float"``, ``"double"``, or ``""`` for the dtype that the comparison needs.
        full_in_eval: with ``precision``, whether evaluations are in full precision (``FSDP_USE_FULL_PREC_IN_EVAL``).
        backward_prefetch: ``"BACKWARD_PRE"``, ``"BACKWARD_POST"`` or ``""``.
        forward_prefetch: whether forward prefetches the next unit.
        limits: ``limit_all_gathers``.
        offload: whether shards are on the CPU.
        pins: whether offloaded shards are pinned (``fully_shard``).
        among: if not 0, the value of ``reshard_after_forward`` (``fully_shard``).
        ahead: number of neighbors that every unit prefetches in forward and in backward (``fully_shard``).
        ties: number of pairs of leaves that share their first parameter; see `tied_leaves`.
        hook: a user hook. ``"communication"``, ``"accumulated"`` (on each parameter of the optimizer) and
            ``"backward"`` (on inputs of each leaf) halve gradients. ``"in_place"`` modifies the gradient that it
            reduces. ``"plain"``, ``"async"`` and ``"low"`` only reduce. Or ``""``.
        steps: number of optimizer steps of the training loop.
        micro_batches: for each micro-batch of a step, whether its backward synchronizes; the last one does.
        forwards: number of forwards before each backward.
        separate: whether each of these forwards has a backward of its own, after all of them.
        samples: number of samples of a rank in each forward.
        momentum: whether the optimizer has momentum.
        adam: whether the optimizer is Adam instead of SGD.
        steps_by: ``"foreach"``, ``"fused"``, or ``""``: with lists of tensors if ``seed`` is even.
        stepping: ``"in_backward"``, or ``"event"``, which sets the event that the next iteration waits for
            (`set_post_optim_event`); or ``""``.
        scales: whether a gradient scaler is used.
        clears: ``set_to_none`` of ``zero_grad()``.
        evaluates: an evaluation without grad: ``"between"`` forward and backward, or ``"after"`` each step. Or, right
            before the optimizer step, a forward *with* grad and without a backward: ``"forgotten"``. Or ``""``.
        clips: whether to call ``clip_grad_norm_``, with a limit that is never reached.
        bomb: if not ``""``, a micro-batch before each step raises an error in ``"forward"`` or ``"backward"``.
        bomb_at: number of the leaf that raises it.
        resets: whether the iteration is reset manually after that error (``fully_shard``).
        edits: how the user changes or reads the parameters between steps: ``"write"`` halves the full ones (with
            ``fully_shard`` the shards), ``"in_place"`` and ``"data"`` halve the shards, ``"read"``, ``"read_on_cpu"``
            and ``"gradients"`` read the full ones; or ``""``.
        saves: the state dict that is taken after each step: ``"full"``, ``"sharded"`` or ``""``.
        tracks_input: whether the batch requires a gradient.
        resumes: the form in which model and optimizer are saved at the end and loaded into others (see `forms_of`);
            both then run another step and are compared. Or ``""``.
        apart: index of a unit among the root's parts that runs alone, without grad, before each step; or -1.
        seed: seed of initial values and batches.
        rank: for the simulated device, the rank of this process; the others are fake ranks.
        batches: location of the batches: ``"device"``, or CPU memory, ``"plain"`` or ``"pinned"``, which the user
            overwrites as soon as forward has returned.
        reads: whether the CPU reads each loss.
        elsewhere: whether the current device of the process is not the device of the model.
        aside: whether each forward and its loss run on a stream of the user, and backward is called on the other one.
        by_hand: a manual unshard or reshard before each micro-batch, or ``""`` (``fully_shard``).
        switches: names of switches that are set (``fully_shard``).
        late: whether the switches are set after the first step.
        sums_late: whether unsynchronized micro-batches are reduced, but not over the replicas (``fully_shard``).
        goes_on: whether their backwards are marked as not the last of the iteration (``fully_shard``).
        calls: calls after the training loop.
    """

    model: Node = field(default_factory=lambda: Node("chain"))
    num_ranks: int = 2
    api: str = "wrapped"
    width: int = 3
    strategy: str = "FULL_SHARD"
    num_replicas: int = 1
    frees: bool = False
    by_mesh: bool = False
    originals: bool = False
    precision: str = "full"
    dtype: str = ""
    full_in_eval: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limits: bool = True
    offload: bool = False
    pins: bool = False
    among: int = 0
    ahead: int = 0
    ties: int = 0
    hook: str = ""
    steps: int = 2
    micro_batches: tuple[bool, ...] = (True,)
    forwards: int = 1
    separate: bool = False
    samples: int = 2
    momentum: bool = False
    adam: bool = False
    steps_by: str = ""
    stepping: str = ""
    scales: bool = False
    clears: bool = True
    evaluates: str = ""
    clips: bool = False
    bomb: str = ""
    bomb_at: int = 0
    resets: bool = False
    edits: str = ""
    saves: str = ""
    tracks_input: bool = False
    resumes: str = ""
    apart: int = -1
    seed: int = 0
    rank: int = 0
    batches: str = "device"
    reads: bool = False
    elsewhere: bool = False
    aside: bool = False
    by_hand: str = ""
    switches: tuple[str, ...] = ()
    late: bool = False
    sums_late: bool = False
    goes_on: bool = False
    calls: tuple[Call, ...] = ()

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are replicated."""
        return "HYBRID" in self.strategy

    @property
    def is_per_parameter(self) -> bool:
        """Whether the front end shards each parameter separately."""
        return "fully_shard" in self.api

    @property
    def is_reentrant(self) -> bool:
        """Whether a module is recomputed by a backward inside the backward."""
        return any(node.checkpoint == "reentrant" for node, _ in walk(self.model))

    def has(self, kind: str) -> bool:
        """Whether the model has a module of this kind."""
        return any(node.kind == kind for node, _ in walk(self.model))

    @property
    def is_apart(self) -> bool:
        """Whether the ranks make different calls."""
        return any("on" in call or _skips_differ(call.get("skip")) for call in self.calls)


def _skips_differ(skip: Any) -> bool:
    return isinstance(skip, list) and skip[0] != skip[1]


# --- calls ---


def calls_of(d: Description) -> Iterator[Call]:
    """All calls of the program."""
    for step in range(d.steps):
        yield from step_of(d, step)
    if d.resumes:
        yield {"do": "resume", "step": d.steps}
    yield from d.calls


def step_of(d: Description, step: int) -> Iterator[Call]:
    """The calls of a step of the training loop."""
    evaluation = {"do": "evaluate", "batch": 100 * step + EVALUATION, "in_mode": True}
    yield {"do": "begin_step", "step": step}
    if d.apart >= 0:
        yield {**evaluation, "part": d.apart}
    if d.bomb:
        yield {"do": "break_off", "bomb": (d.bomb, d.bomb_at), "batch": 100 * step + EVALUATION}
    yield {"do": "zero_grad", "to_none": d.clears, "of_model": False}
    for number, is_reduced in enumerate(d.micro_batches):
        if d.by_hand and d.by_hand != "between":
            yield {"do": "unshard_by_hand"}
        if not is_reduced:
            yield {"do": "sync", "value": False}
        for index in range(number * d.forwards, (number + 1) * d.forwards):
            yield {"do": "forward", "batch": 100 * step + index}
        if d.by_hand == "between":
            yield {"do": "unshard_by_hand"}
        if d.evaluates == "between":
            yield evaluation
        for _ in range(d.forwards if d.separate else 1):
            yield {"do": "backward", "which": "first" if d.separate else "all"}
        if not is_reduced:
            yield {"do": "sync", "value": True}
    yield {"do": "read_gradients"}
    if d.evaluates == "forgotten":
        yield {**evaluation, "is_recorded": True}
    if d.clips:
        yield {"do": "clip", "most": 1e9, "norm": 2.0}
    yield {"do": "step"}
    if d.evaluates == "after":
        yield evaluation
    if d.edits:
        yield {"do": "edit", "how": d.edits}
    if d.saves:
        yield {"do": "save", "form": d.saves}


# --- JSON ---


def to_json(description: Description) -> str:
    """One line of JSON without fields that have their default."""
    return json.dumps(_plain(description), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    blank = type(value)()  # type: ignore[call-arg]
    named = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: _plain(item) for name, item in named.items() if item != getattr(blank, name)}


def from_json(text: str) -> Description:
    """The description from the output of `to_json`.

    Raises:
        TypeError: if a field is unknown.
    """
    fields = json.loads(text)
    model = _node(fields.pop("model", {"kind": "chain"}))
    return Description(model=model, **{name: _tuples(item) for name, item in fields.items()})


def _node(fields: dict[str, Any]) -> Node:
    children = tuple(_node(child) for child in fields.pop("children", []))
    return Node(**fields, children=children)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# --- legal descriptions ---


def walk(node: Node, unit: Node | None = None) -> Iterator[tuple[Node, Node]]:
    """Every node with the innermost unit that contains it, which can be itself; the outermost node is always a unit."""
    unit = node if unit is None or node.unit else unit
    yield node, unit
    for child in node.children:
        yield from walk(child, unit)


def legal(description: Description) -> Description:
    """The description, or the nearest meaningful one."""
    d = _legal_options(description)
    d = replace(d, model=_Rules(d).repaired(d.model, None, "root"))
    if num_uses(d) > 2:
        # Low precision rounds each use by about one percent, and the order of many uses matters; norms amplify this.
        d = replace(d, precision="full")
    parts = d.model.children
    if not (0 <= d.apart < len(parts) and parts[d.apart].unit):
        # Only a unit can all-gather its own parameters.
        d = replace(d, apart=-1)
    return d


def _legal_options(d: Description) -> Description:
    changes: dict[str, Any] = {"micro_batches": (*d.micro_batches[:-1], True), "rank": min(d.rank, d.num_ranks - 1)}
    if not d.is_hybrid or d.num_ranks % d.num_replicas:
        changes["num_replicas"] = 1
    if d.is_per_parameter:
        changes.update(clips=False, apart=-1, full_in_eval=False, **_legal_for_each_parameter(d))
    elif d.edits in ("data", "gradients") and not d.originals:
        changes["edits"] = "write"
    if d.stepping == "in_backward":
        # Unsynchronized gradients must not be used for a step, and neither must gradients of an interrupted backward.
        changes.update(micro_batches=(True,) * len(d.micro_batches), bomb="", scales=False, clips=False)
        # The first of two backwards would change the parameters of the second one's forward.
        changes["separate"] = False
        if not (d.originals or d.is_per_parameter):
            changes["stepping"] = ""
    if any(node.every > 1 for node, _ in walk(d.model)):
        # With momentum, zeros in a flat gradient differ from the missing gradients of the single process.
        changes.update(momentum=False, adam=False)
    if d.resumes:
        # An edit would not reach the loaded model, and when it trains, the oracle is already one step ahead.
        changes["edits"] = ""
        if d.evaluates == "between":
            changes["evaluates"] = "after"
        if d.resumes not in forms_of(d.api):
            changes["resumes"] = "full"
        if d.is_per_parameter and any(node.same_as >= 0 for node, _ in walk(d.model)):
            # torch.distributed.checkpoint does not send full values to a module that occurs twice.
            changes["resumes"] = "own"
    if d.strategy != "HYBRID_SHARD":
        changes["frees"] = False
    if not _may_hook(d):
        changes["hook"] = ""
    return replace(d, **changes)


def _legal_for_each_parameter(d: Description) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if d.among and (d.num_ranks // (d.num_replicas if d.is_hybrid else 1)) % d.among:
        changes["among"] = 0
    if d.offload:
        # Torch's scaler all-reduces on the device of the gradients, and NCCL does not support CPU tensors.
        changes["scales"] = False
    if not d.is_hybrid or d.is_reentrant:
        # A nested backward reduces on its own, and partial sums would belong to other parameters: this is an error.
        changes["sums_late"] = False
    return changes


def forms_of(api: str) -> tuple[str, ...]:
    """The forms in which this front end can save a state.

    ===========  ==================================================  ===================================================
    form         the wrapper                                         `fully_shard`, by torch's functions for state dicts
    ===========  ==================================================  ===================================================
    ``full``     full values on each rank                            the same
    ``rank0``    full values on the CPU of rank 0, else nothing      the same; loaded by a broadcast
    ``sharded``  ``ShardedTensor``                                   ``DTensor``
    ``dtensor``  ``DTensor``
    ``local``    this rank's shard, and the optimizer's own dict
    ``own``                                                          a copy of both objects' ``state_dict()``
    ===========  ==================================================  ===================================================
    """
    if "fully_shard" in api:
        return ("full", "rank0", "sharded", "own")
    return ("full", "rank0", "sharded", "dtensor", "local")


def _may_hook(d: Description) -> bool:
    nodes = [node for node, _ in walk(d.model)]
    if d.hook in COMMUNICATION_HOOKS:
        return d.is_per_parameter or not d.is_hybrid
    if d.hook == "accumulated":
        # A hook that runs after several reductions halves earlier results again; the oracle does not model this.
        # With fully_shard, as in torch, it happens if gradients wait for a backward through several uses.
        is_reused = d.is_per_parameter and len(d.micro_batches) > 1 and any(node.times > 1 for node in nodes)
        return not any(d.micro_batches[:-1]) and not d.is_reentrant and not is_reused
    # Autograd searches for tensors only in these types of inputs and outputs.
    return all(node.returns in ("tensor", "tuple") and not node.keywords for node in nodes)


class _Rules:
    """Corrects a tree of nodes, from the outside to the inside, leaf by leaf."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.leaves: list[tuple[Node, str]] = []  # with the name of the unit that owns its parameters
        self.frozen_units: dict[str, bool] = {}
        # A flat parameter cannot be partly frozen. Original parameters can, but autograd treats the frozen ones as
        # trained. Reentrant checkpointing detects this, because it checks whether any input requires a gradient.
        self.is_uniform = not description.is_per_parameter and (description.is_reentrant or not description.originals)

    def repaired(self, node: Node, unit: str | None, path: str) -> Node:
        d = self.description
        changes: dict[str, Any] = {}
        unit = path if unit is None or node.unit else unit
        if d.is_hybrid or not node.unit or d.api != "wrapped":
            changes["strategy"] = ""
        if node.kind in LEAVES:
            return self._mended_leaf(replace(node, children=(), **changes), unit)
        changes["same_as"] = -1
        children = tuple(self.repaired(child, unit, f"{path}.{i}") for i, child in enumerate(node.children))
        return replace(node, **changes, children=children)

    def _mended_leaf(self, leaf: Node, unit: str) -> Node:
        if self._may_be_same(leaf, unit):
            leaf = replace(leaf, strategy="", frozen=self.leaves[leaf.same_as][0].frozen)
        else:
            leaf = replace(leaf, same_as=-1)
            if self.description.is_per_parameter:
                leaf = _for_each_parameter(leaf)
            if self.is_uniform and leaf.kind != "idle":
                # Trained completely or not at all: the first leaf of the unit decides.
                leaf = replace(leaf, frozen=self.frozen_units.setdefault(unit, leaf.frozen))
        self.leaves.append((leaf, unit))
        return leaf

    def _may_be_same(self, node: Node, unit: str) -> bool:
        if not 0 <= node.same_as < len(self.leaves) or node.unit:
            return False
        other, its_unit = self.leaves[node.same_as]
        # Both callers of a shared module must find it unsharded.
        return other.same_as < 0 and other.returns == node.returns and (other.unit or its_unit == unit)


def _for_each_parameter(leaf: Node) -> Node:
    """With per-parameter reduction, each parameter needs a gradient on all ranks, and a scalar has no rows to split.

    PyTorch also refuses empty gradients next to others.
    """
    if leaf.kind == "one_sided":
        leaf = replace(leaf, kind="own")
    if leaf.kind in ("own", "unused") and OWN_SHAPES[leaf.size % len(OWN_SHAPES)] in ((), (0,)):
        leaf = replace(leaf, size=1)
    return leaf


def tied_leaves(d: Description) -> list[tuple[int, int]]:
    """The pairs of leaves, by number, that share their first parameter: the first of those that may be tied."""
    leaves = [(node, unit) for node, unit in walk(d.model) if node.kind in LEAVES]
    pairs = []
    for (first, (a, unit)), (second, (b, other)) in itertools.combinations(enumerate(leaves), 2):
        alike = (a.kind, a.frozen, a.size) == (b.kind, b.frozen, b.size) and a.kind != "idle"
        # Equal nodes compare equal, but two units are the same only if they are the same object.
        if alike and unit is other and a.same_as < 0 and b.same_as < 0:
            pairs.append((first, second))
    return pairs[: d.ties]


def num_uses(description: Description) -> int:
    """The largest number of uses of one parameter in one backward.

    The sum of two uses does not depend on their order. With more uses, the order changes the last bits.
    """
    uses: dict[int, int] = {}
    leaves = 0

    def count(node: Node, times: int) -> None:
        nonlocal leaves
        times *= node.times
        for child in node.children:
            count(child, times)
        if node.kind in LEAVES:
            number = node.same_as if node.same_as >= 0 else leaves
            uses[number] = uses.get(number, 0) + times
            leaves += 1

    count(description.model, description.forwards)
    for first, second in tied_leaves(description):
        uses[first] = uses[second] = uses[first] + uses[second]
    return max(uses.values(), default=0)
