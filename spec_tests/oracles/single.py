"""The reference: one process that does sequentially what several ranks do in parallel.

It computes the batches of rank 0, then those of rank 1 and so on, keeps the gradients of each rank separate, and
averages them where the ranks would reduce. Except for rounding, this is training on the concatenated batch. It rounds
at the same places as the ranks, so comparisons can be bitwise.

Worked example, two ranks, three micro-batches of which the second and the third are synchronized (``gmr`` is the
gradient of micro-batch m on rank r)::

    (g00 + g10 + g01 + g11) / 2     the first two are reduced together
    + (g20 + g21) / 2               the third is reduced separately
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from spec_tests.oracles.gathering import clean_name


class SingleProcess:
    """A plain model that simulates all ranks. Each rank has its own buffers.

    Args:
        model: the unsharded model.
        num_ranks: number of ranks to simulate.
        units: the names of the parameters of each unit.
        compute_dtype: if the ranks compute in low precision, a copy of the model in this dtype computes.
        reduce_dtype: the dtype in which gradients of different ranks are added; their own one, if it is not given.

    Attributes:
        waiting: for each rank, by name: the gradients that wait for a reduction.
        unit_of: the unit of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        num_ranks: int,
        units: Mapping[str, Iterable[str]],
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.num_ranks, self.units = model, num_ranks, units
        self.unit_of = {name: unit for unit, names in units.items() for name in names}
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.computing = model if compute_dtype is None else copy.deepcopy(model).to(compute_dtype)
        self.is_stale = False
        self.waiting: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
        self.buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(num_ranks)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model, by their names without wrappers."""
        return {clean_name(name): parameter for name, parameter in self.model.named_parameters()}

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[nn.Module]:
        """The model with the buffers of a rank. The gradients of backwards inside wait for a reduction."""
        self._refresh()
        copy_all(self.buffers[rank], self.computing.buffers())
        reduced = [parameter.grad for parameter in self.computing.parameters()]
        self.computing.zero_grad(set_to_none=True)
        computed: list[Tensor | None] = []
        try:
            yield self.computing
            computed = [parameter.grad for parameter in self.computing.parameters()]
        finally:
            for parameter, gradient in zip(self.computing.parameters(), reduced, strict=True):
                parameter.grad = gradient
            copy_all(self.computing.buffers(), self.buffers[rank])
        waiting = self.waiting[rank]
        for name, gradient in zip(self.parameters, computed, strict=False):
            if gradient is not None:
                waiting[name] = waiting[name] + gradient if name in waiting else gradient

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copies changed values to the copy that computes. This costs a fiftieth of a deep copy."""
        if self.computing is not self.model and self.is_stale:
            copy_all(self.model.parameters(), self.computing.parameters())
        self.is_stale = False

    def reduce(self, units: Iterable[str] | None = None, factor: float = 1.0) -> None:
        """Adds the mean of the waiting gradients of these units, or of all, to the gradients of the model.

        Args:
            units: the units.
            factor: the mean is multiplied by it.
        """
        chosen = set(self.units if units is None else units)
        for name, parameter in self.parameters.items():
            there = [of_rank.pop(name) for of_rank in self.waiting if self.unit_of[name] in chosen and name in of_rank]
            if not there:
                continue
            dtype = self.reduce_dtype or there[0].dtype
            total = there[0].to(dtype)
            for gradient in there[1:]:
                total = total + gradient.to(dtype)
            mean = (total / self.num_ranks).to(parameter.dtype) * factor
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def fill_up(self) -> None:
        """In a flat gradient, a parameter without a gradient counts as zero if its unit has any gradient."""
        parameters = self.parameters
        for names in self.units.values():
            members = [parameters[name] for name in names]
            if any(member.grad is not None for member in members):
                for member in members:
                    if member.grad is None and member.requires_grad:
                        member.grad = torch.zeros_like(member)


def copy_all(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    """Copies values, tensor by tensor."""
    for from_here, to_there in zip(source, target, strict=True):
        to_there.copy_(from_here)
