"""Plain records that describe a unit and its parameters. They contain no tensors, no groups, and cannot change.

Worked example, ``Linear(3, 5)`` on two ranks. Its 15 weights and 5 biases are split into two shards::

    wrapper        weight  {0: 10, 1: 5}        one bucket of 20, split in the middle
                   bias    {0: 0, 1: 5}
    fully_shard    weight  {0: 9, 1: 6}         3 rows of 3, and 2
                   bias    {0: 3, 1: 2}         each parameter separately

*In torch:* nothing comparable. ``print(model)`` shows flat parameters and their sizes on this rank.

Spec: EXPLAIN-02.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from minifsdp_tools.formulas import Shape


@dataclass(frozen=True)
class ParameterSummary:
    """One parameter of a unit.

    Attributes:
        name: its full name in the model.
        ties: full names of the other places in which the model uses it.
        shape: shape of the unsharded parameter on this rank: all of it, unless tensor parallelism shards it too.
        dim: the sharded dim; 0 in a flat parameter.
        dtype: the stored dtype.
        trained: whether it requires a gradient.
        owned: the number of its elements that each rank stores, by global rank; only for the ranks of one shard group.
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
        """The shape with the sharded dim moved to the front, as a `Job` needs it."""
        return (
            (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])
            if self.shape
            else (1,)
        )


@dataclass(frozen=True)
class UnitSummary:
    """One unit: the parameters that are all-gathered, resharded and reduced together.

    The default choices are those of ``fully_shard`` for the whole model.

    Attributes:
        name: name of its module in the model; empty for the model itself.
        type: class of the module.
        parameters: its parameters, in the order of their elements in the unit.
        ranks: the global ranks of the shard group.
        compute: dtype of the unsharded parameters.
        reduce: dtype in which gradients are reduced.
        num_replicas: number of replicas.
        per_parameter: made by ``fully_shard``, with each parameter sharded separately; otherwise a flat parameter.
        frees: whether it is resharded after forward and all-gathered again for backward.
        reshards_to: ranks that share the parameters between forward and backward, if an integer was chosen.
        offloads: whether the shards are on the host.
        gathered_bytes: bytes of the unsharded parameters, including padding.
        low_batch_norms: names of batch norms in it that compute, or keep statistics, in elements of less than 4 bytes.
        is_root: it is the unit of the model itself.
        is_planned: it does not exist yet.
    """

    name: str
    type: str
    parameters: tuple[ParameterSummary, ...]
    ranks: tuple[int, ...]
    compute: torch.dtype
    reduce: torch.dtype
    num_replicas: int = 1
    per_parameter: bool = True
    frees: bool = False
    reshards_to: int | None = None
    offloads: bool = False
    gathered_bytes: int = 0
    low_batch_norms: tuple[str, ...] = ()
    is_root: bool = True
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
        """The stored dtype of most of its elements."""
        elements: Counter[torch.dtype] = Counter()
        for parameter in self.parameters:
            elements[parameter.dtype] += parameter.numel
        return elements.most_common(1)[0][0]

    @property
    def owned_bytes(self) -> dict[int, int]:
        """Bytes of its parameters that each rank stores, without padding, by global rank."""
        found: Counter[int] = Counter()
        for parameter in self.parameters:
            found.update(
                {
                    rank: num * parameter.dtype.itemsize
                    for rank, num in parameter.owned.items()
                }
            )
        return dict(sorted(found.items()))

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all parameters, as a `Job` needs them."""
        return [parameter.cut_shape for parameter in self.parameters]

    @property
    def trained_shapes(self) -> list[Shape]:
        """The shapes of the trained parameters."""
        return [
            parameter.cut_shape for parameter in self.parameters if parameter.trained
        ]

    def __str__(self) -> str:
        """A table of the number of elements of each parameter on each rank."""
        ranks = list(self.owned_bytes)
        width = max(len(parameter.name) for parameter in self.parameters)
        lines = [
            f"{self.label}, {self.type}: elements on",
            " " * width + "".join(f"{f'rank {r}':>14}" for r in ranks),
            *(
                f"{parameter.name:{width}}"
                + "".join(f"{parameter.owned.get(r, 0):14,}" for r in ranks)
                for parameter in self.parameters
            ),
        ]
        return "\n".join(lines)
