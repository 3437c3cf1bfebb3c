"""``minifsdp.explain(model)``: the units of a model, the shards of each rank, and the memory and traffic of a step.

::

    print(minifsdp.explain(model))                  # in a notebook, the last line of a cell shows a table
    found = minifsdp.explain(model, optimizer="SGD")
    found.cost.peak, found.largest.name, [advice.kind for advice in found.warnings]

Nothing is communicated: the model stores how it is sharded (``explain_units.py``), and the rest is arithmetic. So any
rank may call it alone, before the first forward or between two steps, on the meta device, and even before the model is
sharded: then the result describes the one unit that it would become.

The calculator in ``cost.py`` does the arithmetic; tests compare it with measured bytes. This module converts the model
to the calculator's input, a `Job`. Worked example, `Sequential` of two ``Linear(100, 100)``, each a unit, two ranks,
Adam::

    Job(units=[[(100, 100), (100,)]] * 2, num_shards=2, optimizer=8)
    stored   (4 + 8) bytes * 20 200 / 2 = 121 200

`Explanation.assumptions` lists where the model differs from what a job can express (``explain_advice.py``).

To compute the cost of another choice, change the job: ``cost_of(replace(found.job, num_shards=64))``.

*In torch:* nothing comparable.

Spec: EXPLAIN-01 to EXPLAIN-12.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from minifsdp.checks.details import detail, some
from minifsdp.engine.messages import message, rank_of_this_process
from minifsdp_tools.cost import Cost, Job, cost_of
from minifsdp_tools.explain_advice import (
    MOST_NAMES,
    Advice,
    advice_for,
    assumptions,
    most_common,
)
from minifsdp_tools.explain_records import UnitSummary
from minifsdp_tools.explain_units import choices_of, type_of, units_of
from minifsdp_tools.formulas import size_of

# Numbers that an optimizer keeps for each element, in the stored dtype, without step counters.
STATES = {
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"), 2),
    **dict.fromkeys(("Adagrad", "RMSprop", "SGD with momentum"), 1),
    "SGD": 0,
}
# The strategies of sharded units, by whether there are replicas, and whether units are resharded after forward.
_STRATEGIES = {
    (False, True): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (True, False): "_HYBRID_SHARD_ZERO2",
}


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. ``str()`` converts it to text, and a notebook shows it as tables.

    Attributes:
        model: class of the model.
        rank: the rank that called `explain`.
        optimizer: the given name.
        units: all units, the root's own first, the others in the order of the model.
        job: the input of the calculator: sizes and choices.
        cost: its result, in bytes for each rank and one step with one batch: stored, peaks, sent.
        warnings: possible problems, each with cause and remedy.
        assumptions: where the calculation does not describe this model exactly.
        numel: elements of all parameters in units.
        largest: the unit with the most unsharded bytes.
        parameter_bytes: bytes of parameters that a rank stores, padding included, on the device or the host.
        optimizer_bytes: bytes of optimizer states that a rank stores.
        gradient_bytes: bytes of reduced gradients that a rank has on the device between backward and the optimizer's
            step.
    """

    model: str
    rank: int
    optimizer: str
    units: tuple[UnitSummary, ...]
    job: Job
    cost: Cost
    warnings: tuple[Advice, ...]
    assumptions: tuple[str, ...]
    numel: int
    largest: UnitSummary
    parameter_bytes: float
    optimizer_bytes: float
    gradient_bytes: float

    def __str__(self) -> str:
        """The text for a terminal."""
        return self._rendered("explain.txt.jinja")

    def _repr_html_(self) -> str:
        """The tables for a notebook."""
        return self._rendered("explain.html.jinja")

    def _rendered(self, template: str) -> str:
        from minifsdp_tools.timeline import (
            TEMPLATES,
        )  # not at the top, because it imports jinja2, which is slow

        return TEMPLATES.get_template(template).render(
            found=self,
            headline=_headline(self),
            units=list(_lines_of_units(self.units)),
            memory=_memory(self),
            not_included=detail("explain-not-in-it"),
            size=size_of,
            dtypes=_dtypes,
            some=partial(some, most=MOST_NAMES),
        )


def explain(
    model: nn.Module,
    *,
    optimizer: str = "Adam",
    num_shards: int | None = None,
    activations: float = 0,
) -> Explanation:
    """Describes the units of a model, the shards of each rank, and the memory and traffic of a step.

    Nothing is communicated, so any rank may call it alone; nothing is changed.

    Args:
        model: sharded with either API, partly sharded, or not sharded. The remaining parameters are shown as the unit
            that they would become.
        optimizer: a name of `STATES`; ``Adam`` and others of ``torch.optim``, ``SGD with momentum``.
        num_shards: number of ranks for a model that is not sharded at all; by default all ranks, or 1 without a
            process group.
        activations: bytes, added to the peaks of forward and backward. They depend on the batch and on the model's
            code, and are not predicted.

    Returns:
        An object to print, to show in a notebook, or to read fields from.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unknown optimizer, or a model without parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(message("explain-type", type=type(model).__name__))
    if optimizer not in STATES:
        raise ValueError(
            message(
                "explain-optimizer",
                optimizer=optimizer,
                known=", ".join(sorted(STATES)),
            )
        )
    if not (units := units_of(model, num_shards)):
        raise ValueError(message("explain-nothing", type=type(model).__name__))
    like = most_common(units)
    job = _job_for(model, units, like, STATES[optimizer], activations)
    cost = cost_of(job)
    return Explanation(
        model=type_of(model),
        rank=rank_of_this_process(),
        optimizer=optimizer,
        units=tuple(units),
        job=job,
        cost=cost,
        warnings=tuple(advice_for(units)),
        assumptions=tuple(assumptions(model, units, like)),
        numel=sum(unit.numel for unit in units),
        largest=max(units, key=lambda unit: unit.gathered_bytes),
        parameter_bytes=job.parameter_bytes,
        optimizer_bytes=job.optimizer_bytes,
        gradient_bytes=cost.after_backward - cost.stored,
    )


def _job_for(
    model: nn.Module,
    units: Sequence[UnitSummary],
    like: UnitSummary,
    num_states: int,
    activations: float,
) -> Job:
    """The input of the calculator, with the choices of the unit ``like``."""
    root = next((unit for unit in units if unit.is_root), None)
    others = [unit for unit in units if not unit.is_root]
    of_sharded = _STRATEGIES[like.num_replicas > 1, like.frees or like.is_root]
    return Job(
        units=[unit.shapes for unit in others],
        root=root.shapes if root else (),
        trained=[
            root.trained_shapes if root else [],
            *(unit.trained_shapes for unit in others),
        ],
        strategy=of_sharded if len(like.ranks) > 1 else "NO_SHARD",
        num_shards=len(like.ranks),
        num_replicas=like.num_replicas,
        per_parameter=like.per_parameter,
        root_frees=root is not None and root.frees,
        reshards_to=like.reshards_to,
        stored=like.stored,
        compute=like.compute,
        reduce=like.reduce,
        optimizer=num_states * like.stored.itemsize,
        offload=like.offloads,
        activations=activations,
        **choices_of(model),
    )


# ---- the text -------------------------------------------------------------------------------------------------------


def _headline(found: Explanation) -> str:
    ranks = f"{found.job.num_shards} rank{'s' if found.job.num_shards > 1 else ''}"
    copies = f", {found.job.num_replicas} copies" if found.job.num_replicas > 1 else ""
    num_units = f"{len(found.units)} unit{'s' if len(found.units) > 1 else ''}"
    return f"{found.model}: {found.numel:,} parameters in {num_units}, {found.job.strategy} on {ranks}{copies}"


def _dtypes(unit: UnitSummary) -> str:
    """``float32``, or the stored, compute and reduce dtypes if they differ."""
    names = [
        str(dtype).removeprefix("torch.")
        for dtype in (unit.stored, unit.compute, unit.reduce)
    ]
    return names[0] if len(set(names)) == 1 else " / ".join(names)


def _memory(found: Explanation) -> list[tuple[str, float, str]]:
    """Lines of the prediction: name, number of bytes, and contents."""
    cost = found.cost
    parts = f"parameters {size_of(found.parameter_bytes)}, {found.optimizer} {size_of(found.optimizer_bytes)}"
    if found.job.buffers:
        parts += f", buffers {size_of(found.job.buffers)}"
    collectives = {"AG": "all-gather", "RS": "reduce-scatter", "AR": "all-reduce"}
    sent = [
        f"{num} {collectives[kind]}{'s' if num > 1 else ''}"
        for kind, num in cost.num_collectives.items()
        if num
    ]
    lines = [
        (
            "stored between steps",
            cost.stored + cost.host,
            parts + (", on the host" if cost.host else ""),
        ),
        (
            "after backward",
            cost.after_backward,
            f"with gradients {size_of(found.gradient_bytes)}",
        ),
        ("at most, in forward", cost.peak_forward, ""),
        ("at most, in backward", cost.peak_backward, ""),
        ("at most, in the optimizer's step", cost.peak_optimizer, ""),
        ("sent in a step", sum(cost.sent.values()), ", ".join(sent)),
    ]
    return [
        (what, num, "the peak" if num == cost.peak and not words else words)
        for what, num, words in lines
    ]


def _lines_of_units(
    units: Sequence[UnitSummary],
) -> Iterator[tuple[str, str, str, str, str]]:
    """A line of the table for each unit, or for a series of equal units."""

    def columns(unit: UnitSummary) -> tuple[str, str, str, str]:
        # Bytes that a rank stores: one number, or the smallest and the largest.
        least = min(unit.owned_bytes.values())
        most = max(unit.owned_bytes.values())
        owned = (
            size_of(most) if least == most else f"{size_of(least)} to {size_of(most)}"
        )
        dtypes = _dtypes(unit) + (", planned" if unit.is_planned else "")
        return f"{unit.numel:,}", size_of(unit.gathered_bytes), owned, dtypes

    for alike, group in itertools.groupby(units, columns):
        first, *others = group
        label = (
            f"{first.label} to {others[-1].label} ({len(others) + 1})"
            if others
            else first.label
        )
        yield label, *alike
