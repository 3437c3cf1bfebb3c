"""The reference: the same run in one process, rank after rank.

One process can do sequentially what N ranks do in parallel. It computes the batches of rank 0, then those of rank 1 and
so on, keeps the gradients of each rank separate, and averages them where the ranks would reduce. Except for rounding,
this is training on the concatenated batch. It rounds at the same places as the ranks, so comparisons can be bitwise.

Worked example, two ranks, three micro-batches of which the second and the third are synchronized (``gmr`` is the
gradient of micro-batch m on rank r)::

    (g00 + g10 + g01 + g11) / 2     the first two are reduced together
    + (g20 + g21) / 2               the third is reduced separately

If N processes need the result, each computes the batches of its own rank, and they exchange their gradients. This is
independent of the library under test, and the model is unsharded in every process.

For low precision, the model is copied to that dtype in each step. Its gradients are cast to the dtype of the reduction;
the mean is cast to the default dtype.
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

# Powers of two: multiplication by them is exact, so it does not matter whether a kernel fuses it with an addition.
LEARNING_RATE, MOMENTUM = 1 / 32, 0.5
# Adam divides by the size of a gradient. A tiny gradient is mostly rounding error, which must not cause a full step.
EPSILON = 1 / 8


def optimizer_for(description: Description, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of both sides; ``None`` if the model has no parameters."""
    parameters = list(model.parameters())
    if not parameters:
        return None
    # List operators, which PyTorch uses by default on a GPU, do not increase the version counter of a DTensor.
    foreach = description.seed % 2 == 0
    if description.adam:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=EPSILON, foreach=foreach)
    momentum = MOMENTUM if description.momentum else 0.0
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, foreach=foreach)


def loss_of(outputs: list[Tensor]) -> Tensor:
    """The loss of the outputs of all forwards before a backward."""
    return torch.stack([torch.tanh(output).square().mean() for output in outputs]).sum()


@dataclass
class _Part:
    """Results of the batches of one rank. They are pickled as numbers, which is exact and fast."""

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
        description: the run.
        rank: the rank whose batches this process computes; all ranks must then train together. ``None`` computes the
            batches of all ranks.

    Attributes:
        model: the plain model in full precision; ``.grad`` holds the mean gradients of the last step.
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
        """All forwards and backwards of a step for all ranks. Returns the losses by rank and micro-batch."""
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
        """A model with the current values in the compute dtype and without gradients; always the same object.

        Copying values costs a fiftieth of a deep copy, and pieces have no buffers.
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
        """The contribution of each rank to a segment."""
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
        """Adds the mean of the ranks' gradients to the model's gradients."""
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
        """In a flat gradient, a parameter without a gradient counts as zero."""
        parameters = dict(self.model.named_parameters())
        for _, names in self.units.values():
            if any(parameters[name].grad is not None for name in names):
                for parameter in (parameters[name] for name in names):
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)

    def gradient_norm(self) -> float:
        """The norm of all gradients as one vector."""
        return float(
            torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None] or [_ZERO]).norm()
        )

    def optimize(self) -> None:
        """Runs the optimizer step."""
        if self._optimizer is not None:
            self._optimizer.step()

    @torch.no_grad()
    def evaluate(self, step: int, index: int, rank: int, part: int | None = None) -> Tensor:
        """The output for a batch of one rank, of the model or of one part alone, with the current values."""
        computing = self._computing_copy()
        if part is None:
            return self._forward(computing, step, index, rank)
        node = self.description.model.children[part]
        return output_of(node, computing.parts[part], self._batch(step, index, rank))

    @torch.no_grad()
    def edit(self) -> None:
        """An edit of the parameters by a user between steps."""
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
