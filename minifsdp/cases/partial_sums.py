"""Backwards of other parameters, while a partial sum is not all-reduced over the replicas yet.

With replicas, a program reduces several backwards over the shard group only, and all-reduces their sum once. Each
backward uses another expert of the unit::

    fully_shard(model, mesh=mesh)                # dimensions (replicate, shard)
    model.set_requires_all_reduce(False)
    loss(model(first)).backward()                # uses expert 0: a partial sum of its two parameters
    model.set_requires_all_reduce(True)
    loss(model(second)).backward()               # uses expert 1

Without this case, the second backward adds the gradient of expert 1 to the partial sum of expert 0.

The case extends both to the parameters of either one. A missing gradient, and a missing part of the partial sum, is
zero. So all parameters get a gradient, and one all-reduce is enough.

Worked example: the partial sum has the parameters 0 and 1, and the gradient 2 and 3. Afterwards, both have 0 to 3.

If the experts are units of their own, the second backward does not reach the unit of expert 0 at all. So at the end of
a backward, `PartialSums` reduces zeros for each unit that still has a partial sum to all-reduce.

*In torch:* ``FSDPParamGroup._prepare_partial_reduce_output``, since 2.15. Earlier versions raise an error.

Spec: NEW-08.
"""

from typing import Any

import torch

from minifsdp.engine.layout import Gradient
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import RootState


def join_partial(
    layout: PerParameterLayout, plan: ReducePlan, gradient: Gradient
) -> None:
    """Extends the partial sum of ``plan`` and ``gradient`` to the same parameters.

    The compute stream reads the partial sum. It has waited for the reduction that wrote it.
    """
    assert plan.partial is not None
    numbers, partial = plan.partial
    either = sorted({*numbers, *gradient.indices})
    params = layout.params
    sums = dict(
        zip(
            numbers,
            partial.split([params[number].chunk_numel for number in numbers]),
            strict=True,
        )
    )
    parts = dict(zip(gradient.indices, gradient.parts, strict=True))
    for number in either:
        param = params[number]
        if number not in sums:
            sums[number] = partial.new_zeros(param.chunk_numel)
        if number not in parts:
            parts[number] = partial.new_zeros(param.shape)
    plan.partial = (either, torch.cat([sums[number] for number in either]))
    gradient.indices = either
    gradient.parts = [parts[number] for number in either]


class PartialSums:
    """Reduces the partial sums of the units that a backward has not reached.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._iteration = root_state.iteration
        self._iteration.points.backward_ends.append(self._reduce_rest)
        for unit in self._iteration.units:
            for plan in unit.plans:
                plan.join_partial = join_partial

    def _due(self) -> list[tuple[Any, ReducePlan]]:
        return [
            (unit.layout, plan)
            for unit in reversed(self._iteration.units)
            for plan in unit.plans
            if plan.partial is not None and plan.all_reduces and unit.policy.reduces
        ]

    def _reduce_rest(self) -> bool:
        if self._due():
            # The reduction in flight includes its partial sum only when it is completed.
            self._iteration.reducer.finish()
        for layout, plan in self._due():
            assert plan.partial is not None
            numbers, partial = plan.partial
            shapes = [layout.params[number].shape for number in numbers]
            zeros = Gradient(list(map(partial.new_zeros, shapes)), list(numbers))
            self._iteration.reducer.reduce(layout, plan, zeros)
        return False
