"""The same run in one process, rank after rank.

What N ranks do at once, one process can do one after the other: it computes the batches of rank 0, then those of rank
1, keeps each rank's gradient apart, and takes the mean where the ranks would have met. That is training on the
concatenated batch, except for rounding; and it rounds where the ranks round, so that a comparison can be bit by bit.

Worked example, two ranks, three micro-batches of which the second and the third are synchronised (``gmr`` is the
gradient of micro-batch m on rank r)::

    (g00 + g10 + g01 + g11) / 2     the first two meet once
    + (g20 + g21) / 2               the third for itself

Low precision is a copy of the model in that dtype, made anew for each step. Its gradients are widened, or narrowed, to
the dtype of the sum; the mean is brought to the default dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
    if description.adam:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=EPSILON)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM if description.momentum else 0.0)


def loss_of(outputs: list[Tensor]) -> Tensor:
    """One number from the outputs of all forwards before a backward."""
    return torch.stack([torch.tanh(output).square().mean() for output in outputs]).sum()


class Oracle:
    """Trains the model of a description in this process.

    Attributes:
        model: the plain model in full precision; ``.grad`` holds the last step's mean gradients.
        units: its units.
        input_gradients: of the last step, by rank and number of the forward.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
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
        self.input_gradients = {}
        losses: list[list[float]] = [[] for _ in range(d.num_ranks)]
        for segment in _segments(d.micro_batches):
            gradients = []
            computing = self._computing_copy()
            for rank in range(d.num_ranks):
                for number in segment:
                    losses[rank].append(self._forward_backward(computing, step, number, rank))
                gradients.append([p.grad for p in computing.parameters()])
                computing.zero_grad(set_to_none=True)
            self._meet(gradients)
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
