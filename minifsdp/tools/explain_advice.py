"""Warnings about how a model is divided into units: five kinds, each with its cause and a remedy.

The size of units is a trade-off. A unit is unsharded as a whole while it computes, so a large unit costs memory. Each
unit needs two all-gathers and a reduction in a step, each with a start-up latency, so small units cost time. Worked
example, a model of 100 million parameters in float32 on 8 ranks::

    one unit                    400 MB unsharded, 400 MB of gradients, on each rank, for any number of ranks
    100 units of a million       8 MB unsharded at a time, and 300 collectives of 4 MB
    10 units of ten million     80 MB unsharded at a time, and 30 collectives of 40 MB

1. *dominant*: one unit has more than `DOMINANT` of the parameters;
2. *small*: a unit has fewer than `KNEE` elements, below which communication became slower in the FSDP paper (arXiv
   2304.11277, figure 2: 2**30 elements in all, the time rises sharply once one all-gather is below 33 million), and has
   less than a tenth of the largest unit, or a hundredth of the model. Without the second condition every small model
   would get this warning, with nothing to gain. The root's own unit is excluded: it has the remaining parameters;
3. *tied*: a parameter is used in several places. All of them must stay in one unit;
4. *frozen*: in a flat unit some parameters are trained and others are not. The flat parameter has one gradient, which
   is allocated and reduced for all. ``fully_shard`` only reduces trained parameters, so it gets no such warning. A
   planned unit gets it, because it can still be sharded with either API;
5. *batch-norm*: one that computes, or keeps its running statistics, in less than 4 bytes.

*In torch:* FSDP1 warns of the fourth, and of the fifth while it makes it a unit of its own.

Spec: EXPLAIN-06 to EXPLAIN-10.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minifsdp.engine.messages import detail
from minifsdp.tools.explain_records import UnitSummary

# Fraction of all parameters.
DOMINANT = 0.6
# Elements of one all-gather.
KNEE = 33_000_000


@dataclass(frozen=True)
class Advice:
    """A warning.

    Attributes:
        kind: ``dominant``, ``small``, ``tied``, ``frozen`` or ``batch-norm``.
        units: labels of the units that it is about: names, or ``(root)``.
        cause: the problem and its cost.
        remedy: how to avoid it.
    """

    kind: str
    units: tuple[str, ...]
    cause: str
    remedy: str


def advice_for(units: Sequence[UnitSummary]) -> list[Advice]:
    """All warnings about these units, in the order of the list above."""
    found = [*_dominant(units), *_small(units)]
    for unit in units:
        found += [*_tied(unit), *_frozen(unit), *_batch_norm(unit)]
    kinds = ("dominant", "small", "tied", "frozen", "batch-norm")
    return sorted(found, key=lambda advice: kinds.index(advice.kind))


def size_of(num_bytes: float) -> str:
    """A number of bytes as text: ``"4.2 MB"``; a MB is 10**6 bytes."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(
        (f"{num_bytes / factor:.3g} {unit}" for unit, factor in units if num_bytes >= factor), f"{num_bytes:g} B"
    )


def some(names: Sequence[str], most: int = 4) -> str:
    """The names as a list in text, at most ``most`` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _dominant(units: Sequence[UnitSummary]) -> Iterator[Advice]:
    total = sum(unit.numel for unit in units)
    for unit in units:
        # A unit that is stored on one rank is never all-gathered.
        if unit.numel > DOMINANT * total and (len(unit.ranks) > 1 or unit.is_planned):
            cause = detail(
                "explain-dominant", percent=round(100 * unit.numel / total), size=size_of(unit.gathered_bytes)
            )
            remedy = detail("explain-dominant-remedy", candidates=_candidates(unit))
            yield Advice("dominant", (unit.label,), cause, remedy)


def _candidates(unit: UnitSummary) -> str:
    """The series of names like ``blocks.3.linear.weight`` with the most elements, as text in parentheses."""
    elements: Counter[str] = Counter()
    members: dict[str, set[str]] = {}
    for parameter in unit.parameters:
        found = re.match(r"(.*?\.)?(\d+)\.", parameter.name)
        if found:
            series = f"{found[1] or ''}*"
            elements[series] += parameter.numel
            members.setdefault(series, set()).add(found[2])
    if not elements:
        return ""
    series = elements.most_common(1)[0][0]
    return f" (here: the {len(members[series])} modules {series})"


def _small(units: Sequence[UnitSummary]) -> Iterator[Advice]:
    total, largest = sum(unit.numel for unit in units), max((unit.numel for unit in units), default=0)
    small = [
        unit
        for unit in units
        if unit.numel < min(KNEE, max(largest / 10, total / 100))
        and not unit.is_root
        and len(unit.ranks) * unit.num_replicas > 1
    ]
    if small:
        labels = tuple(unit.label for unit in small)
        numel = max(unit.numel for unit in small)
        cause = detail("explain-small", num=len(small), numel=f"{numel:,}", knee=KNEE // 10**6)
        yield Advice("small", labels, cause, detail("explain-small-remedy"))


def _tied(unit: UnitSummary) -> Iterator[Advice]:
    for parameter in unit.parameters:
        if parameter.ties:
            cause = detail("explain-tied", name=parameter.name, ties=some(parameter.ties))
            yield Advice("tied", (unit.label,), cause, detail("explain-tied-remedy"))


def _frozen(unit: UnitSummary) -> Iterator[Advice]:
    frozen = [parameter for parameter in unit.parameters if not parameter.trained]
    is_flat = unit.is_planned or not unit.per_parameter
    if is_flat and 0 < len(frozen) < len(unit.parameters):
        num_bytes = sum(parameter.numel for parameter in frozen) * unit.compute.itemsize
        names = some([parameter.name for parameter in frozen])
        cause = detail("explain-frozen", num=len(frozen), names=names, size=size_of(num_bytes))
        yield Advice("frozen", (unit.label,), cause, detail("explain-frozen-remedy"))


def _batch_norm(unit: UnitSummary) -> Iterator[Advice]:
    if unit.low_batch_norms:
        cause = detail("explain-batch-norm", names=some(unit.low_batch_norms))
        yield Advice("batch-norm", (unit.label,), cause, detail("explain-batch-norm-remedy"))
