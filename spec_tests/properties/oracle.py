"""The same run in one process, rank after rank.

What N ranks do at once, one process can do one after the other: it computes the batches of rank 0, then those of rank
1, keeps each rank's gradient apart, and takes the mean where the ranks would have met. That is training on the
concatenated batch, except for rounding; and it rounds where the ranks round, so that a comparison can be bit by bit.

Worked example, two ranks, three micro-batches of which the second and the third are synchronised (``gmr`` is the
gradient of micro-batch m on rank r)::

    (g00 + g10 + g01 + g11) / 2     the first two meet once
    + (g20 + g21) / 2               the third for itself

Where N processes want to know, each computes the batches of its own rank, and they tell each other: these are sums that
nobody else takes part in, of a model that is whole everywhere.

Low precision is a copy of the model in that dtype, made anew for each step. Its gradients are widened, or narrowed, to
the dtype of the sum; the mean is brought to the default dtype.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.oracles.gathering import as_numbers, from_numbers
from spec_tests.properties.build import PRECISIONS, Piece, batch, is_per_parameter, output_of, plain_model, units_of
from spec_tests.properties.description import Description

__all__ = ["LEARNING_RATE", "Oracle", "loss_of", "optimizer_for"]

# Powers of two: a product with them is exact, so it does not matter whether a kernel fuses it with a sum.
LEARNING_RATE, MOMENTUM = 1 / 32, 0.5
# Adam divides by the size of a gradient. That of a tiny one is mostly rounding, which must not become a whole step.
EPSILON = 1 / 8


def optimizer_for(description: Description, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of both sides; ``None`` if there is nothing to optimise."""
    parameters = list(model.parameters())
    if not parameters:
        return None
    # List operators, which PyTorch uses by default on a GPU, do not increase the version of a DTensor.
    foreach = description.seed % 2 == 0
    if description.adam:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=EPSILON, foreach=foreach)
    momentum = MOMENTUM if description.momentum else 0.0
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, foreach=foreach)


def loss_of(outputs: list[Tensor]) -> Tensor:
    """One number from the outputs of all forwards before a backward."""
    return torch.stack([torch.tanh(output).square().mean() for output in outputs]).sum()


@dataclass
class _Part:
    """What the batches of one rank have given; they travel as numbers, which are exact, and pickled in no time."""

    losses: list[float]
    gradients: list[Tensor | None]
    input_gradients: dict[tuple[int, int], Tensor | None]
    error: str = ""

    def __reduce__(self) -> Any:
        inputs = {key: as_numbers(value) for key, value in self.input_gradients.items()}
        return _arrived, (self.losses, [as_numbers(gradient) for gradient in self.gradients], inputs, self.error)


def _arrived(losses: Any, gradients: Any, inputs: Any, error: str) -> _Part:
    here = functools.partial(from_numbers, device=device())
    return _Part(losses, [here(gradient) for gradient in gradients], {k: here(v) for k, v in inputs.items()}, error)


class Oracle:
    """Trains the model of a description in this process.

    Args:
        description: of the run.
        rank: whose batches to compute here, if there is a process for each rank; then all of them must train. ``None``
            computes the batches of all.

    Attributes:
        model: the plain model in full precision; ``.grad`` holds the last step's mean gradients.
        units: its units.
        input_gradients: of the last step, by rank and number of the forward.
    """

    def __init__(self, description: Description, rank: int | None = None) -> None:
        self.description, self.rank = description, rank
        self.model: Piece = plain_model(description)
        self.units = units_of(self.model)
        self._optimizer = optimizer_for(description, self.model)
        self._copy = self._copied()
        self.input_gradients: dict[tuple[int, int], Tensor | None] = {}
        self._clear(True)

    def _clear(self, to_none: bool) -> None:
        self.model.zero_grad(set_to_none=to_none)

    def backward(self, step: int) -> list[list[float]]:
        """All forwards and backwards of a step, of all ranks; the losses by rank and micro-batch."""
        d = self.description
        self.model.clock.step = step
        self._clear(d.clears)
        input_gradients: dict[tuple[int, int], Tensor | None] = {}
        losses: list[list[float]] = [[] for _ in range(d.num_ranks)]
        for segment in _segments(d.micro_batches):
            gradients = []
            for rank, part in enumerate(self._parts(step, segment)):
                if part.error:
                    raise RuntimeError(part.error)
                losses[rank].extend(part.losses)
                gradients.append(part.gradients)
                input_gradients.update(part.input_gradients)
            self._meet(gradients)
        self.input_gradients = input_gradients
        if not is_per_parameter(d):
            self._fill_up()
        return losses

    @torch.no_grad()
    def _computing_copy(self) -> Piece:
        """A model with the values of now, in the dtype of the compute and without gradients; the same one every time.

        To copy values costs a fiftieth of what a deep copy does, and pieces have no buffers.
        """
        for computing, parameter in zip(self._copy.parameters(), self.model.parameters(), strict=True):
            computing.copy_(parameter)
        self._copy.zero_grad(set_to_none=True)
        return self._copy

    def _copied(self) -> Piece:
        copied = copy.deepcopy(self.model)
        for module in copied.modules():
            if isinstance(module, Piece):
                module.clock = self.model.clock
        return copied.to(PRECISIONS[self.description.precision].get("param_dtype", torch.get_default_dtype()))

    def _parts(self, step: int, segment: list[int]) -> list[_Part]:
        """What each rank contributes to a segment."""
        computing = self._computing_copy()
        if self.rank is None:
            return [self._part(computing, step, segment, rank) for rank in range(self.description.num_ranks)]
        everybody: list[Any] = [None] * self.description.num_ranks
        dist.all_gather_object(everybody, self._part(computing, step, segment, self.rank))
        return everybody

    def _part(self, computing: Piece, step: int, segment: list[int], rank: int) -> _Part:
        self.input_gradients = {}
        try:
            losses = [self._forward_backward(computing, step, number, rank) for number in segment]
        except RuntimeError as error:
            return _Part([], [], {}, str(error))
        gradients = [p.grad for p in computing.parameters()]
        computing.zero_grad(set_to_none=True)
        return _Part(losses, gradients, self.input_gradients)

    def _forward_backward(self, computing: Piece, step: int, number: int, rank: int) -> float:
        d = self.description
        outputs = [self._forward(computing, step, number * d.forwards + i, rank) for i in range(d.forwards)]
        loss = loss_of(outputs)
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach())

    def _forward(self, computing: Piece, step: int, index: int, rank: int) -> Tensor:
        x, tokens = self._batch(step, index, rank)
        return output_of(self.description.model, computing, (x, tokens))

    def _batch(self, step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
        x, tokens = batch(self.description, step, index, rank)
        if self.description.tracks_input and torch.is_grad_enabled():
            x.requires_grad_()
            x.register_hook(lambda gradient: self.input_gradients.__setitem__((rank, index), gradient))
        return x.to(PRECISIONS[self.description.precision].get("param_dtype", torch.get_default_dtype())), tokens

    def _meet(self, gradients: list[list[Tensor | None]]) -> None:
        """Adds the mean of the ranks' gradients to the model's."""
        for parameter, of_ranks in zip(self.model.parameters(), zip(*gradients, strict=True), strict=True):
            there = [gradient for gradient in of_ranks if gradient is not None]
            if not there:
                continue
            dtype = PRECISIONS[self.description.precision].get("reduce_dtype", there[0].dtype)
            total = there[0].to(dtype)
            for gradient in there[1:]:
                total = total + gradient.to(dtype)
            mean = (total / len(of_ranks)).to(torch.get_default_dtype())
            if self.description.hook == "communication":
                mean = mean / 2
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            if self.description.hook == "accumulated":
                parameter.grad = parameter.grad / 2

    def _fill_up(self) -> None:
        """In a flat gradient, whoever has none counts as zero."""
        parameters = dict(self.model.named_parameters())
        for _, names in self.units.values():
            if any(parameters[name].grad is not None for name in names):
                for parameter in (parameters[name] for name in names):
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)

    def gradient_norm(self) -> float:
        """The norm of all gradients, seen as one vector."""
        return float(
            torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None] or [_ZERO]).norm()
        )

    def optimize(self) -> None:
        """The optimizer's step."""
        if self._optimizer is not None:
            self._optimizer.step()

    @torch.no_grad()
    def evaluate(self, step: int, index: int, rank: int, part: int | None = None) -> Tensor:
        """The output for a batch of one rank, of the model or of one of its parts alone, with the values of now."""
        computing = self._computing_copy()
        if part is None:
            return self._forward(computing, step, index, rank)
        node = self.description.model.children[part]
        return output_of(node, computing.parts[part], self._batch(step, index, rank))

    @torch.no_grad()
    def edit(self) -> None:
        """What a user does between steps."""
        for parameter in self.model.parameters():
            parameter.mul_(0.5)


_ZERO = torch.zeros(())


def _segments(micro_batches: tuple[bool, ...]) -> Iterator[list[int]]:
    """The numbers of the micro-batches that are reduced together."""
    segment: list[int] = []
    for number, is_reduced in enumerate(micro_batches):
        segment.append(number)
        if is_reduced:
            yield segment
            segment = []
