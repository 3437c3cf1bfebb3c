"""One training run as plain data.

A description says everything: two runs with equal descriptions do the same operations on the same numbers. It is a tree
of frozen dataclasses with numbers, words and tuples in it, so that it can be compared, sent to a rank and printed. As
JSON, what has its default is left out, and a minimal failure fits on one line::

    {"model":{"kind":"chain","children":[{"kind":"linear","unit":true}]},"num_ranks":2}

Not every combination is meaningful. A parameter cannot be tied across two units; a flat parameter is trained as a whole
or not at all. `legal` replaces what is not meaningful by the nearest thing that is. Who draws or shrinks a description
need not know these rules, he only calls it afterwards.
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
# Parameters that modules register themselves, by number: a scalar, one element, an odd row, a matrix, and nothing.
OWN_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 5), (0,), (7, 1, 3))


@dataclass(frozen=True)
class Node:
    """One module; every one of them maps ``(x, tokens)`` to a tensor like ``x``.

    Attributes:
        kind: one of `LEAVES` or `CONTAINERS`; see ``build.py`` for what they compute.
        size: hidden features, rows of an embedding, or a number in `OWN_SHAPES`.
        unit: whether it is sharded as a unit of its own.
        frozen: its own parameters are not trained.
        times: how often its parent calls it in a row.
        checkpoint: its parent computes it again in backward: ``"reentrant"`` or ``"nonreentrant"``.
        returns: what its forward returns: a ``"tensor"``, or one inside a ``"tuple"``, ``"dict"`` or ``"nested"``.
        keywords: its parent calls it with keyword arguments.
        every: takes part in every so many-th step only; else its parent passes by.
        same_as: at a leaf: the very module of that leaf, counted from 0 in a walk, instead of one of its own.
        strategy: another strategy than that of the model, for a unit.
        children: the modules inside, of a container.
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
        num_ranks: ranks in all.
        door: who shards; see ``build.py``.
        width: features of what modules hand on.
        strategy: name of a sharding strategy.
        num_replicas: with a hybrid strategy, copies of the model; they divide ``num_ranks``.
        originals: ``use_orig_params``.
        precision: a name in ``build.PRECISIONS``.
        backward_prefetch: ``"BACKWARD_PRE"``, ``"BACKWARD_POST"`` or ``""``.
        forward_prefetch: whether forward asks for the next unit.
        limits: ``limit_all_gathers``.
        offload: whether shards live on the CPU.
        by_policy: units are named by an auto-wrap policy instead of being wrapped one by one.
        ties: pairs of leaves, by number, that share their first parameter.
        steps: optimizer steps.
        micro_batches: of each step, whether each one's backward is synchronised; the last is.
        forwards: how many forwards precede each backward.
        samples: samples of a rank in each forward.
        momentum: whether the optimizer has any.
        clears: ``set_to_none`` of ``zero_grad()``.
        evaluates: a forward without grad ``"between"`` forward and backward, or ``"after"`` each step; or one *with*
            grad that no backward follows, right before the optimizer's step: ``"forgotten"``; or never.
        clips: whether ``clip_grad_norm_`` is asked for the norm, with a limit that is never reached.
        bomb: before each step comes a micro-batch that breaks off in ``"forward"`` or ``"backward"``, if not ``""``.
        bomb_at: at the leaf of this number.
        edits: between steps the user halves all parameters.
        saves: whether the state dict is compared at the end.
        tracks_input: the batch wants a gradient, too.
        adam: Adam is the optimizer, instead of SGD.
        hook: a hook of the user's halves gradients: ``"communication"``, in place of what combines them, or after it;
            ``"accumulated"``, on each parameter of the optimizer; ``"backward"``, on the inputs of each leaf; or none.
        resumes: at the end model and optimizer are saved in this form, see ``saving.py``, and loaded into
            others; both do one step more, and are compared. Or ``""``.
        apart: number of a unit among the root's parts that runs alone, without grad, before each step; or -1.
        seed: of initial values and batches.
    """

    model: Node = field(default_factory=lambda: Node("chain"))
    num_ranks: int = 2
    door: str = "fsdp1"
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
        """Whether there are copies of shards."""
        return "HYBRID" in self.strategy


# --- JSON ---


def to_json(description: Description) -> str:
    """One line, without what has its default."""
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
    """The description that `to_json` has written.

    Raises:
        TypeError: it has a field that is not known.
    """
    fields = json.loads(text)
    model = _node(fields.pop("model", {"kind": "chain"}))
    return Description(model=model, **{name: _tuples(item) for name, item in fields.items()})


def _node(fields: dict[str, Any]) -> Node:
    children = tuple(_node(child) for child in fields.pop("children", []))
    return Node(**fields, children=children)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# --- what is meaningful ---


def walk(node: Node, unit: Node | None = None) -> Iterator[tuple[Node, Node]]:
    """Every node with the innermost unit around it, itself included; the outermost is always a unit."""
    unit = node if unit is None or node.unit else unit
    yield node, unit
    for child in node.children:
        yield from walk(child, unit)


def legal(description: Description) -> Description:
    """The description itself, or the nearest one that is meaningful."""
    d = _legal_options(description)
    d = replace(d, model=_Rules(d).mended(d.model, None, "root"))
    d = replace(d, ties=tuple(pair for pair in d.ties if _may_tie(d, *pair)))
    if num_uses(d) > 2:
        # Low precision rounds each use by a percent, and the order of many decides; repeated norms blow that up.
        d = replace(d, precision="full")
    parts = d.model.children
    if not (0 <= d.apart < len(parts) and parts[d.apart].unit):
        # Only a unit can gather itself.
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
    if "fully_shard" in d.door:
        # What this door has no word for. Original parameters stay visible in any case.
        changes.update(originals=True, by_policy=False, limits=True, forward_prefetch=False, backward_prefetch="")
        changes.update(clips=False, apart=-1)
    if any(node.every > 1 for node, _ in walk(d.model)):
        # A flat gradient has zeros where the single process has nothing, and momentum can tell the difference.
        changes.update(momentum=False, adam=False)
    if d.resumes:
        # Whoever has been loaded is edited by nobody, and when he trains, the oracle is a step ahead.
        changes["edits"] = False
        if d.evaluates == "between":
            changes["evaluates"] = "after"
        if d.resumes not in forms_of(d.door):
            changes["resumes"] = "full"
        if "fully_shard" in d.door and any(node.same_as >= 0 for node, _ in walk(d.model)):
            # torch.distributed.checkpoint does not send whole values to a module that is found in two places.
            changes["resumes"] = "own"
    if not _may_hook(d):
        changes["hook"] = ""
    return replace(d, **changes)


def forms_of(door: str) -> tuple[str, ...]:
    """In which forms a state can be saved there; see ``saving.py``."""
    if "fully_shard" in door:
        return ("full", "rank0", "sharded", "own")
    return ("full", "rank0", "sharded", "dtensor", "local")


def _may_hook(d: Description) -> bool:
    nodes = [node for node, _ in walk(d.model)]
    if d.hook == "communication":
        return "fully_shard" in d.door or not d.is_hybrid
    if d.hook == "accumulated":
        # Who is reduced more than once halves each time what was there before, which the oracle does not know of. With
        # fully_shard that happens, in torch as well, where gradients wait for a backward through several uses.
        is_reused = "fully_shard" in d.door and len(d.micro_batches) > 1 and any(node.times > 1 for node in nodes)
        is_reentrant = any(node.checkpoint == "reentrant" for node in nodes)
        return not any(d.micro_batches[:-1]) and not is_reentrant and not is_reused
    # Autograd looks for inputs and outputs no further than this.
    return all(node.returns in ("tensor", "tuple") and not node.keywords for node in nodes)


class _Rules:
    """Mends a tree of nodes, from the outside to the inside, leaf after leaf."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.leaves: list[tuple[Node, str]] = []  # with the name of the unit that has taken its parameters
        self.frozen_units: dict[str, bool] = {}
        # A flat parameter cannot be half frozen. Originals can, but then autograd takes the frozen ones for trained.
        # Reentrant checkpointing, which asks whether some input wants a gradient, can tell the difference.
        is_reentrant = any(node.checkpoint == "reentrant" for node, _ in walk(description.model))
        self.is_uniform = "fully_shard" not in description.door and (is_reentrant or not description.originals)

    def mended(self, node: Node, unit: str | None, path: str) -> Node:
        d = self.description
        changes: dict[str, Any] = {}
        unit = path if unit is None or node.unit else unit
        if d.is_hybrid or not node.unit or d.door != "fsdp1":
            changes["strategy"] = ""
        if node.kind in LEAVES:
            return self._mended_leaf(replace(node, children=(), **changes), unit)
        changes["same_as"] = -1
        children = tuple(self.mended(child, unit, f"{path}.{i}") for i, child in enumerate(node.children))
        return replace(node, **changes, children=children)

    def _mended_leaf(self, leaf: Node, unit: str) -> Node:
        if self._may_be_same(leaf, unit):
            leaf = replace(leaf, strategy="", frozen=self.leaves[leaf.same_as][0].frozen)
        else:
            leaf = replace(leaf, same_as=-1)
            if "fully_shard" in self.description.door:
                leaf = _for_each_parameter(leaf)
            if self.is_uniform and leaf.kind != "idle":
                # Trained as a whole or not at all: the first one decides.
                leaf = replace(leaf, frozen=self.frozen_units.setdefault(unit, leaf.frozen))
        self.leaves.append((leaf, unit))
        return leaf

    def _may_be_same(self, node: Node, unit: str) -> bool:
        if not 0 <= node.same_as < len(self.leaves) or node.unit:
            return False
        other, its_unit = self.leaves[node.same_as]
        # A shared module must be found gathered by both of its callers.
        return other.same_as < 0 and other.returns == node.returns and (other.unit or its_unit == unit)


def _for_each_parameter(leaf: Node) -> Node:
    """Where parameters are reduced one by one, all ranks must have a gradient of it; and a scalar has no rows to cut.

    PyTorch refuses to put a gradient without elements among others, too.
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
    # Equal nodes are equal, but units are the same only if they are the same object.
    return alike and unit is other and a.same_as < 0 and b.same_as < 0


def num_uses(description: Description) -> int:
    """How often, at most, one parameter is used in one backward.

    With two uses their sum has no order. With more the order in which they are added decides the last bits.
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
