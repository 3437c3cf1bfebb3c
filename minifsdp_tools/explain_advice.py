"""Warnings about how a model is divided into units, and the assumptions of the calculation.

Five kinds of warnings, each with its cause and a remedy. The size of units is a trade-off. A unit is unsharded as a
whole while it computes, so a large unit costs memory. Each unit needs two all-gathers and a reduction in a step, each
with a start-up latency, so small units cost time. Worked example, a model of 100 million parameters in float32 on 8
ranks::

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
5. *batch-norm*: a batch norm computes, or keeps its running statistics, in less than 4 bytes.

A `Job`, the input of the calculator, has one choice of each kind: one compute dtype, one number of ranks. A model can
have several, for instance batch norms in units of their own without mixed precision. Then the job has the choices for
most bytes, and each unit with other choices is listed as an assumption. Worked example, in bytes when unsharded::

    blocks.0     bfloat16    8 000 000
    blocks.1     bfloat16    8 000 000        the job computes in bfloat16
    blocks.norm  float32         4 000        is counted as 2 000, and listed as different

*In torch:* FSDP1 warns about the fourth. For the fifth, it creates a separate unit and warns about it.

Spec: EXPLAIN-03, EXPLAIN-06 to EXPLAIN-11.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from minifsdp.checks.details import detail, some
from minifsdp_tools.explain_records import UnitSummary
from minifsdp_tools.explain_units import is_sharded, left_out, type_of
from minifsdp_tools.formulas import size_of

# Fraction of all parameters.
DOMINANT = 0.6
# Elements of one all-gather.
KNEE = 33_000_000
# Names in a list.
MOST_NAMES = 4


@dataclass(frozen=True)
class Advice:
    """A warning.

    Attributes:
        kind: ``dominant``, ``small``, ``tied``, ``frozen`` or ``batch-norm``.
        units: labels of the affected units: names, or ``(root)``.
        cause: the problem and its cost.
        remedy: how to avoid it.
    """

    kind: str
    units: tuple[str, ...]
    cause: str
    remedy: str


def advice_for(units: Sequence[UnitSummary]) -> Iterator[Advice]:
    """All warnings about these units, in the order of the list above."""
    total = sum(unit.numel for unit in units)
    largest = max(unit.numel for unit in units)
    for unit in units:  # 1.
        # A unit that is stored on one rank is never all-gathered.
        if unit.numel > DOMINANT * total and (len(unit.ranks) > 1 or unit.is_planned):
            yield Advice(
                "dominant",
                (unit.label,),
                detail(
                    "explain-dominant",
                    percent=round(100 * unit.numel / total),
                    size=size_of(unit.gathered_bytes),
                ),
                detail("explain-dominant-remedy", candidates=_candidates(unit)),
            )
    # 2. One warning for all small units.
    limit = min(KNEE, max(largest / 10, total / 100))
    apart = [
        unit
        for unit in units
        if not unit.is_root and len(unit.ranks) * unit.num_replicas > 1
    ]
    if small := [unit for unit in apart if unit.numel < limit]:
        yield Advice(
            "small",
            tuple(unit.label for unit in small),
            detail(
                "explain-small",
                num=len(small),
                numel=f"{max(unit.numel for unit in small):,}",
                knee=KNEE // 10**6,
            ),
            detail("explain-small-remedy"),
        )
    for unit in units:  # 3.
        for parameter in unit.parameters:
            if parameter.ties:
                yield Advice(
                    "tied",
                    (unit.label,),
                    detail(
                        "explain-tied",
                        name=parameter.name,
                        ties=", ".join(parameter.ties),
                    ),
                    detail("explain-tied-remedy"),
                )
    for unit in units:  # 4.
        frozen = [parameter for parameter in unit.parameters if not parameter.trained]
        if (unit.is_planned or not unit.per_parameter) and 0 < len(frozen) < len(
            unit.parameters
        ):
            numel = sum(parameter.numel for parameter in frozen)
            yield Advice(
                "frozen",
                (unit.label,),
                detail(
                    "explain-frozen",
                    num=len(frozen),
                    names=some([parameter.name for parameter in frozen], MOST_NAMES),
                    size=size_of(numel * unit.compute.itemsize),
                ),
                detail("explain-frozen-remedy"),
            )
    for unit in units:  # 5.
        if unit.low_batch_norms:
            yield Advice(
                "batch-norm",
                (unit.label,),
                detail(
                    "explain-batch-norm", names=some(unit.low_batch_norms, MOST_NAMES)
                ),
                detail("explain-batch-norm-remedy"),
            )


def _candidates(unit: UnitSummary) -> str:
    """The series of names like ``blocks.3.linear.weight`` with the most elements, as text in parentheses."""
    # For each series, the number of elements in each of its modules.
    elements: dict[str, Counter[str]] = {}
    for parameter in unit.parameters:
        if found := re.match(r"(.*?\.)?(\d+)\.", parameter.name):
            elements.setdefault(f"{found[1] or ''}*", Counter())[found[2]] += (
                parameter.numel
            )
    if not elements:
        return ""
    series, modules = max(elements.items(), key=lambda item: item[1].total())
    return f" (here: the {len(modules)} modules {series})"


# ---- assumptions ----------------------------------------------------------------------------------------------------


def _choices(unit: UnitSummary) -> dict[str, object]:
    """The choices that a job has only once, but that may differ between units."""
    return {
        "kind of sharding": "by parameter" if unit.per_parameter else "flat",
        "number of ranks": (len(unit.ranks), unit.num_replicas),
        "mesh": len({tuple(parameter.owned) for parameter in unit.parameters}),
        "stored dtype": unit.stored,
        "compute dtype": unit.compute,
        "reduce dtype": unit.reduce,
        "offload": "host" if unit.offloads else "device",
        # The root's own unit follows another rule, which the job includes.
        "resharding after forward": None
        if unit.is_root
        else (unit.frees, unit.reshards_to),
    }


def most_common(units: Sequence[UnitSummary]) -> UnitSummary:
    """A unit with the choices for the most unsharded bytes; the root's own unit only if there is no other."""
    candidates = [unit for unit in units if not unit.is_root] or units
    num_bytes: Counter[tuple[object, ...]] = Counter()
    for unit in candidates:
        num_bytes[tuple(_choices(unit).values())] += unit.gathered_bytes
    return max(candidates, key=lambda unit: num_bytes[tuple(_choices(unit).values())])


def assumptions(
    model: nn.Module, units: Sequence[UnitSummary], like: UnitSummary
) -> Iterator[str]:
    """Descriptions of the differences between this model and the job."""
    usual = _choices(like)
    for unit in units:
        if differs := [
            what
            for what, choice in _choices(unit).items()
            if choice and usual[what] and choice != usual[what]
        ]:
            yield detail("explain-differs", unit=unit.label, what=", ".join(differs))
    if any(unit.is_planned for unit in units):
        yield detail("explain-planned", type=type_of(model))
    if nested := [
        unit.label
        for unit in units
        if not unit.is_root
        and any(other.name.startswith(f"{unit.name}.") for other in units)
    ]:
        yield detail("explain-nested", names=some(nested, MOST_NAMES))
    if {bool(unit.trained_shapes) for unit in units} == {True, False}:
        yield detail("explain-frozen-first")
    if mixed := [
        unit.label
        for unit in units
        if not unit.per_parameter and 0 < len(unit.trained_shapes) < len(unit.shapes)
    ]:
        yield detail("explain-mixed", names=some(mixed, MOST_NAMES))
    if is_sharded(model) and (left := left_out(model, units)):
        yield detail(
            "explain-left-out",
            names=some(list(left), MOST_NAMES),
            size=size_of(sum(parameter.nbytes for parameter in left.values())),
        )
