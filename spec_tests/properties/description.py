"""One training run as plain data.

A description is complete: two runs with equal descriptions do the same operations on the same numbers. It is a tree of
frozen dataclasses that contain numbers, strings and tuples, so it can be compared, sent to a rank and printed. The JSON
form omits fields that have their default, so a minimal failure fits on one line::

    {"model":{"kind":"chain","children":[{"kind":"linear","unit":true}]},"num_ranks":2}

Not every combination is meaningful: a parameter cannot be tied across two units, and a flat parameter is trained
either completely or not at all. `legal` replaces a combination by the nearest meaningful one. Functions that draw or
reduce a description do not need these rules; they call `legal` afterwards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "CONTAINERS",
    "LEAVES",
    "OWN_SHAPES",
    "Description",
    "Node",
    "forms_of",
    "from_json",
    "legal",
    "num_uses",
    "to_json",
    "walk",
]

CONTAINERS = ("chain", "sum", "detach", "blind")
LEAVES = ("linear", "mlp", "embedding", "norm", "own", "idle", "unused", "one_sided")
# Shapes of parameters that modules register themselves, by number: a scalar, one element, an odd row, a matrix, empty.
OWN_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 5), (0,), (7, 1, 3))


@dataclass(frozen=True)
class Node:
    """One module, which maps ``(x, tokens)`` to a tensor like ``x``.

    Attributes:
        kind: one of `LEAVES` or `CONTAINERS`; ``build.py`` describes their computations.
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
    """A training run.

    Attributes:
        model: the outermost module, always a unit.
        num_ranks: total number of ranks.
        api: the front end that shards; see ``build.py``.
        width: number of features of inputs and outputs.
        strategy: name of a sharding strategy.
        num_replicas: with a hybrid strategy, the number of replicas; must divide ``num_ranks``.
        originals: ``use_orig_params``.
        precision: a name in ``build.PRECISIONS``.
        backward_prefetch: ``"BACKWARD_PRE"``, ``"BACKWARD_POST"`` or ``""``.
        forward_prefetch: whether forward prefetches the next unit.
        limits: ``limit_all_gathers``.
        offload: whether shards are on the CPU.
        by_policy: whether an auto-wrap policy selects the units, instead of one call per unit.
        ties: pairs of leaves, by number, that share their first parameter.
        steps: number of optimizer steps.
        micro_batches: for each micro-batch of a step, whether its backward synchronizes; the last one does.
        forwards: number of forwards before each backward.
        samples: number of samples of a rank in each forward.
        momentum: whether the optimizer has momentum.
        clears: ``set_to_none`` of ``zero_grad()``.
        evaluates: an evaluation without grad: ``"between"`` forward and backward, or ``"after"`` each step. Or, right
            before the optimizer step, a forward *with* grad and without a backward: ``"forgotten"``. Or ``""``.
        clips: whether to call ``clip_grad_norm_``, with a limit that is never reached.
        bomb: if not ``""``, a micro-batch before each step raises an error in ``"forward"`` or ``"backward"``.
        bomb_at: number of the leaf that raises it.
        edits: whether the user halves all parameters between steps.
        saves: whether the state dict is compared at the end.
        tracks_input: whether the batch requires a gradient.
        adam: whether the optimizer is Adam instead of SGD.
        hook: a user hook that halves gradients: ``"communication"``, instead of the reduction or after it;
            ``"accumulated"``, on each parameter of the optimizer; ``"backward"``, on inputs of each leaf; or ``""``.
        resumes: the form in which model and optimizer are saved at the end and loaded into others (see ``saving.py``);
            both then run another step and are compared. Or ``""``.
        apart: index of a unit among the root's parts that runs alone, without grad, before each step; or -1.
        seed: seed of initial values and batches.
    """

    model: Node = field(default_factory=lambda: Node("chain"))
    num_ranks: int = 2
    api: str = "fsdp1"
    width: int = 3
    strategy: str = "FULL_SHARD"
    num_replicas: int = 1
    originals: bool = False
    precision: str = "full"
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limits: bool = True
    offload: bool = False
    by_policy: bool = False
    ties: tuple[tuple[int, int], ...] = ()
    steps: int = 2
    micro_batches: tuple[bool, ...] = (True,)
    forwards: int = 1
    samples: int = 2
    momentum: bool = False
    clears: bool = True
    evaluates: str = ""
    clips: bool = False
    bomb: str = ""
    bomb_at: int = 0
    edits: bool = False
    saves: bool = False
    tracks_input: bool = False
    apart: int = -1
    adam: bool = False
    hook: str = ""
    resumes: str = ""
    seed: int = 0

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are replicated."""
        return "HYBRID" in self.strategy


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
    d = replace(d, ties=tuple(pair for pair in d.ties if _may_tie(d, *pair)))
    if num_uses(d) > 2:
        # Low precision rounds each use by about one percent, and the order of many uses matters; norms amplify this.
        d = replace(d, precision="full")
    parts = d.model.children
    if not (0 <= d.apart < len(parts) and parts[d.apart].unit):
        # Only a unit can all-gather its own parameters.
        d = replace(d, apart=-1)
    return d


def _legal_options(d: Description) -> Description:
    changes: dict[str, Any] = {"micro_batches": (*d.micro_batches[:-1], True)}
    if not d.bomb:
        changes["bomb_at"] = 0
    if d.is_hybrid:
        if d.num_ranks % d.num_replicas:
            changes["num_replicas"] = 1
    else:
        changes["num_replicas"] = 1
    if "fully_shard" in d.api:
        # Options that this front end does not have. Original parameters are always visible.
        changes.update(originals=True, by_policy=False, limits=True, forward_prefetch=False, backward_prefetch="")
        changes.update(clips=False, apart=-1)
    if any(node.every > 1 for node, _ in walk(d.model)):
        # With momentum, zeros in a flat gradient differ from the missing gradients of the single process.
        changes.update(momentum=False, adam=False)
    if d.resumes:
        # An edit would not reach the loaded model, and when it trains, the oracle is already one step ahead.
        changes["edits"] = False
        if d.evaluates == "between":
            changes["evaluates"] = "after"
        if d.resumes not in forms_of(d.api):
            changes["resumes"] = "full"
        if "fully_shard" in d.api and any(node.same_as >= 0 for node, _ in walk(d.model)):
            # torch.distributed.checkpoint does not send full values to a module that occurs twice.
            changes["resumes"] = "own"
    if not _may_hook(d):
        changes["hook"] = ""
    return replace(d, **changes)


def forms_of(api: str) -> tuple[str, ...]:
    """The forms in which this front end can save a state; see ``saving.py``."""
    if "fully_shard" in api:
        return ("full", "rank0", "sharded", "own")
    return ("full", "rank0", "sharded", "dtensor", "local")


def _may_hook(d: Description) -> bool:
    nodes = [node for node, _ in walk(d.model)]
    if d.hook == "communication":
        return "fully_shard" in d.api or not d.is_hybrid
    if d.hook == "accumulated":
        # A hook that runs after several reductions halves earlier results again; the oracle does not model this.
        # With fully_shard, as in torch, it happens if gradients wait for a backward through several uses.
        is_reused = "fully_shard" in d.api and len(d.micro_batches) > 1 and any(node.times > 1 for node in nodes)
        is_reentrant = any(node.checkpoint == "reentrant" for node in nodes)
        return not any(d.micro_batches[:-1]) and not is_reentrant and not is_reused
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
        is_reentrant = any(node.checkpoint == "reentrant" for node, _ in walk(description.model))
        self.is_uniform = "fully_shard" not in description.api and (is_reentrant or not description.originals)

    def repaired(self, node: Node, unit: str | None, path: str) -> Node:
        d = self.description
        changes: dict[str, Any] = {}
        unit = path if unit is None or node.unit else unit
        if d.is_hybrid or not node.unit or d.api != "fsdp1":
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
            if "fully_shard" in self.description.api:
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


def _may_tie(d: Description, first: int, second: int) -> bool:
    leaves = [(node, unit) for node, unit in walk(d.model) if node.kind in LEAVES]
    if not 0 <= first < second < len(leaves):
        return False
    (a, unit), (b, other) = leaves[first], leaves[second]
    alike = (a.kind, a.frozen, a.size) == (b.kind, b.frozen, b.size) and a.kind != "idle"
    # Equal nodes compare equal, but two units are the same only if they are the same object.
    return alike and unit is other and a.same_as < 0 and b.same_as < 0


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
    for first, second in description.ties:
        uses[first] = uses[second] = uses[first] + uses[second]
    return max(uses.values(), default=0)
