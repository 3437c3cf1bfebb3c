"""Converts a model to a `Job`, the input of the calculator, and lists where the model differs from that job.

A job has one choice of each kind: one compute dtype, one number of ranks. A model can have several, for instance batch
norms in units of their own without mixed precision. Worked example, in bytes when unsharded::

    blocks.0     bfloat16    8 000 000
    blocks.1     bfloat16    8 000 000        the job computes in bfloat16
    blocks.norm  float32         4 000        is counted as 2 000, and listed as different

*In torch:* nothing comparable.

Spec: EXPLAIN-03, EXPLAIN-04, EXPLAIN-11.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from minifsdp.engine.messages import detail
from minifsdp.tools.explain_advice import size_of, some
from minifsdp.tools.explain_records import UnitSummary
from minifsdp.tools.explain_units import (
    buffer_bytes,
    is_sharded,
    left_out,
    overlaps,
    prefetches,
    sends_by_itself,
    type_of,
)
from minifsdp.tools.job import Job

# Names of strategies with one replica, and with several.
_FREES, _KEEPS = ("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def _choices(unit: UnitSummary) -> dict[str, object]:
    """The choices of which a job has one each, and units may have several."""
    return {
        "kind of sharding": "by parameter" if unit.per_parameter else "flat",
        "number of ranks": (len(unit.ranks), unit.num_replicas),
        "mesh": len({tuple(parameter.owned) for parameter in unit.parameters}),
        "stored dtype": unit.stored,
        "compute dtype": unit.compute,
        "reduce dtype": unit.reduce,
        "offload": "host" if unit.offloads else "device",
        # The root's own has another rule, which the job includes.
        "resharding after forward": None if unit.is_root else (unit.frees, unit.reshards_to),
    }


def most_common(units: Sequence[UnitSummary]) -> UnitSummary:
    """A unit with the choices of the most unsharded bytes; not the root's own, if there are others."""
    num_bytes: Counter[tuple[object, ...]] = Counter()
    candidates = [unit for unit in units if not unit.is_root] or units
    for unit in candidates:
        num_bytes[tuple(_choices(unit).values())] += unit.gathered_bytes
    ((most, _),) = num_bytes.most_common(1)
    return next(unit for unit in candidates if tuple(_choices(unit).values()) == most)


def job_for(
    model: nn.Module, units: Sequence[UnitSummary], like: UnitSummary, *, states: int, activations: float
) -> Job:
    """The input of the calculator.

    Args:
        model: the model of the units.
        units: all of them.
        like: the unit whose choices are used.
        states: numbers that the optimizer keeps for each element.
        activations: bytes.
    """
    root = next((unit for unit in units if unit.is_root), None)
    others = [unit for unit in units if not unit.is_root]
    one_copy, several = _FREES if like.frees or like.is_root else _KEEPS
    sharded = one_copy if like.num_replicas == 1 else several
    forward, backward = prefetches(model)
    return Job(
        units=[unit.shapes for unit in others],
        root=root.shapes if root else (),
        trained=[root.trained_shapes if root else [], *(unit.trained_shapes for unit in others)],
        strategy=sharded if len(like.ranks) > 1 else "NO_SHARD",
        num_shards=len(like.ranks),
        num_replicas=like.num_replicas,
        per_parameter=like.per_parameter,
        root_frees=root is not None and root.frees,
        reshards_to=like.reshards_to,
        stored=like.stored,
        compute=like.compute,
        reduce=like.reduce,
        optimizer=states * like.stored.itemsize,
        # They may have several dtypes, so they are counted in bytes.
        buffers=buffer_bytes(model),
        buffer=torch.uint8,
        offload=like.offloads,
        forward_prefetch=forward,
        backward_prefetch=backward,
        overlaps=overlaps(model),
        by_messages=sends_by_itself(model),
        activations=activations,
    )


def assumptions(model: nn.Module, units: Sequence[UnitSummary], like: UnitSummary) -> list[str]:
    """Descriptions of the differences between this model and the job."""
    found, usual = [], _choices(like)
    for unit in units:
        differs = [what for what, choice in _choices(unit).items() if choice and usual[what] and choice != usual[what]]
        if differs:
            found.append(detail("explain-differs", unit=unit.label, what=", ".join(differs)))
    if any(unit.is_planned for unit in units):
        found.append(detail("explain-planned", type=type_of(model)))
    nested = [unit.label for unit in units if _is_around_others(unit, units)]
    if nested:
        found.append(detail("explain-nested", names=some(nested)))
    if any(not unit.trained_shapes for unit in units) and any(unit.trained_shapes for unit in units):
        found.append(detail("explain-frozen-first"))
    mixed = [unit.label for unit in units if not unit.per_parameter and 0 < len(unit.trained_shapes) < len(unit.shapes)]
    if mixed:
        found.append(detail("explain-mixed", names=some(mixed)))
    left = left_out(model) if is_sharded(model) else []
    if left:
        num_bytes = sum(parameter.nbytes for _, parameter in left)
        found.append(detail("explain-left-out", names=some([name for name, _ in left]), size=size_of(num_bytes)))
    return found


def _is_around_others(unit: UnitSummary, units: Sequence[UnitSummary]) -> bool:
    return not unit.is_root and any(other.name.startswith(f"{unit.name}.") for other in units)
