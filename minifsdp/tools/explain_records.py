"""What is known of a unit and of its parameters, as plain records: no tensors, no groups, nothing that can change.

Worked example, ``Linear(3, 5)`` on two ranks. Its 15 weights and 5 biases are cut into two pieces::

    wrapper        weight  {0: 10, 1: 5}        one row of 20, cut in the middle
                   bias    {0: 0, 1: 5}
    fully_shard    weight  {0: 9, 1: 6}         3 rows of 3, and 2
                   bias    {0: 3, 1: 2}         each parameter by itself

*In torch:* nothing of the kind. ``print(model)`` shows flat parameters and their sizes on this rank.

Spec: EXPLAIN-02.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from minifsdp.tools.formulas import Shape


@dataclass(frozen=True)
class ParameterSummary:
    """One parameter of a unit.

    Attributes:
        name: its full name in the model.
        ties: full names of the other places in which the model uses it.
        shape: of what this rank has of it when the unit is gathered: all of it, unless tensor parallelism cuts it too.
        dim: the dim along which it is cut; 0 in a flat row.
        dtype: in which it is stored.
        trained: whether it asks for a gradient.
        owned: how many of its elements each rank stores, by global rank; only ranks that share one copy are in it.
    """

    name: str
    ties: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    trained: bool
    owned: Mapping[int, int]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def cut_shape(self) -> Shape:
        """The shape with the dim that is cut before all others, as a `Job` wants it."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :]) if self.shape else (1,)


@dataclass(frozen=True)
class UnitSummary:
    """One unit: what is gathered, freed and reduced together.

    Attributes:
        name: of its module in the model; empty for the model itself.
        type: class of the module.
        parameters: in the order in which they lie in the unit.
        ranks: the global ranks that share one copy of it.
        num_replicas: copies of it.
        per_parameter: made by ``fully_shard``, each parameter is cut by itself; otherwise the wrapper's one flat row.
        frees: whether it is freed after forward and gathered again for backward.
        rests_with: ranks that keep one copy in between, if so chosen.
        compute: dtype of the gathered parameters.
        reduce: dtype in which gradients travel.
        offloads: whether what is stored lives on the host.
        gathered_bytes: of the gathered parameters, padding included.
        low_batch_norms: names of batch norms in it that compute, or keep statistics, in elements of less than 4 bytes.
        is_root: it is the unit of the model itself.
        is_planned: it is not there yet.
    """

    name: str
    type: str
    parameters: tuple[ParameterSummary, ...]
    ranks: tuple[int, ...]
    num_replicas: int
    per_parameter: bool
    frees: bool
    rests_with: int | None
    compute: torch.dtype
    reduce: torch.dtype
    offloads: bool
    gathered_bytes: int
    low_batch_norms: tuple[str, ...]
    is_root: bool
    is_planned: bool = False

    @property
    def label(self) -> str:
        """The name, or ``(root)``."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which most of its elements are stored."""
        elements: Counter[torch.dtype] = Counter()
        for parameter in self.parameters:
            elements[parameter.dtype] += parameter.numel
        return elements.most_common(1)[0][0]

    @property
    def owned_bytes(self) -> dict[int, int]:
        """Bytes of its parameters that each rank stores, without padding, by global rank."""
        found: Counter[int] = Counter()
        for parameter in self.parameters:
            for rank, num in parameter.owned.items():
                found[rank] += num * parameter.dtype.itemsize
        return dict(sorted(found.items()))

    @property
    def shapes(self) -> list[Shape]:
        """Of all parameters, as a `Job` wants them."""
        return [parameter.cut_shape for parameter in self.parameters]

    @property
    def trained_shapes(self) -> list[Shape]:
        """Of those that are trained."""
        return [parameter.cut_shape for parameter in self.parameters if parameter.trained]

    def __str__(self) -> str:
        """Which rank stores how many elements of which parameter, as a table."""
        ranks, width = list(self.owned_bytes), max(len(parameter.name) for parameter in self.parameters)
        lines = [f"{self.label}, {self.type}: elements on", " " * width + "".join(f"{f'rank {r}':>14}" for r in ranks)]
        for parameter in self.parameters:
            lines.append(f"{parameter.name:{width}}" + "".join(f"{parameter.owned.get(r, 0):14,}" for r in ranks))
        return "\n".join(lines)
