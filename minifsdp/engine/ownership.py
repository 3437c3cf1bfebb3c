"""What the optimizer owns of a flat unit: one parameter, or many.

The memory of a flat unit is the same in any case: a shard here, a long tensor there. What differs is what is
*registered* as a parameter, and therefore what ``parameters()`` yields, what an optimizer steps on and where ``.grad``
is found:

* ``flat_parameter.py``: the shard as a whole, one 1-D parameter for the unit;
* ``originals.py``: the original parameters, each showing its part of the shard.

To gradients that makes no difference. Each parameter gets its *part* of what comes, and a flat parameter is the case of
one part. Gradients come in two sizes, and both are found under the same ``.grad``:

* the *reduced* one has the size of the shard: the mean over all ranks, this rank's piece;
* the *unreduced* one, left behind by a backward inside ``no_sync()``, has the size of the whole unit: a sum over the
  micro-batches of this rank alone, for which no piece is known yet.

Worked example, a flat parameter of 4 elements on two ranks, two micro-batches, on rank 0 with gradients ``[1 1 1 1]``
(inside ``no_sync``) and ``[2 2 2 2]``, on rank 1 with ``[3 3 3 3]`` and ``[4 4 4 4]``::

    after the first backward    .grad is [1 1 1 1] on rank 0, [3 3 3 3] on rank 1        unreduced
    during the second           [3 3 3 3] and [7 7 7 7] are reduced: sum 10, mean 5
    after it                    .grad is [5 5] on both                                   reduced

Why show the unreduced gradient at all, and not keep it out of sight? Because ``zero_grad()`` must find it. A sum that
cannot be cleared would leak into the next step. The optimizer is told before it can trip over the difference in size
(see ``optimizer_watch.py``).

*In torch:* ``use_orig_params`` is a question that is asked in more than fifty places of ``_flat_param.py``; gradients
pass through ``_saved_grad_shard``, ``_cpu_grad`` and ``prepare_gradient_for_*``.

Spec: ORIG-01, ORIG-02, ORIG-13, SHARD-06, NOSYNC-02, NOSYNC-05, NOSYNC-10, FWD-07, FWD-08, MP-11, MP-12, STREAM-08.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import nn

from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message

_REQUIRES_GRAD, _VERSION, _ADDRESS = attrgetter("requires_grad"), attrgetter("_version"), methodcaller("data_ptr")


class Ownership(ABC):
    """What the optimizer owns of one flat unit.

    Attributes:
        shard: 1-D, this rank's shard in the stored dtype; a parameter itself, or the memory behind several.
        parameters: what the optimizer owns.
        stand_ins: for each original parameter what to show in its place while the unit is not gathered.
        hides_originals: whether the original parameters are out of sight between computations.
        keep_reduce_dtype: whether a reduced gradient may stay in another dtype than the shard's.
    """

    shard: torch.Tensor
    parameters: list[nn.Parameter]
    stand_ins: Sequence[torch.Tensor]
    hides_originals: bool
    keep_reduce_dtype: bool
    # The reduced gradients that were put aside for unreduced ones; `None` while there are none of these.
    _aside: list[torch.Tensor | None] | None = None
    _unreduced: torch.Tensor | None = None
    _version: int = 0

    @property
    def requires_grad(self) -> bool:
        """Whether anything here is to be trained; the user may change it at any time."""
        return any(map(_REQUIRES_GRAD, self.parameters))

    def parts(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``piece``, which is like the shard: views, or, of a single parameter, all of it."""
        return [piece]

    def whole_parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The same of a whole row, padding included."""
        return [row]

    @abstractmethod
    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters that show ``views``, to be put on the modules for a while."""

    @abstractmethod
    def hide_full(self) -> None:
        """The end of `show_full`."""

    # --- values ---

    def collect(self) -> bool:
        """Fetches into the shard what the user has put into other memory; whether anything was. To be called first."""
        return False

    def settle(self) -> None:  # noqa: B027
        """Adapts the shard to another dtype or device that its parameters have been given, as by ``model.half()``."""

    def overwrite(self, piece: torch.Tensor) -> None:
        """New values for the shard. The change is one that `stamp` shows."""
        with torch.no_grad():
            self.shard.copy_(piece)
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""
        return list(map(_VERSION, self.parameters)), list(map(_ADDRESS, self.parameters))

    # --- reduced gradients ---

    def assign(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Each parameter's ``.grad``, whatever was there before."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None
            if gradient is not None:
                assign_gradient(parameter, gradient)

    def add_reduced(self, piece: torch.Tensor) -> None:
        """Adds to each parameter that is trained its part of a reduced gradient."""
        if piece.dtype is not self.shard.dtype and not self.keep_reduce_dtype:
            piece = piece.to(self.shard.dtype)
        for parameter, part in zip(self.parameters, self.parts(piece), strict=True):
            # Of an original parameter that lies on other ranks there is nothing to step on.
            if not parameter.requires_grad or (part.numel() == 0 and not self.hides_originals):
                continue
            if parameter.grad is None:
                assign_gradient(parameter, part)
            else:
                parameter.grad.add_(part)
            # Autograd did not put the gradient there, so nothing else calls the hooks that wait for it.
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def reduced_gradient(self) -> tuple[torch.Tensor, list[bool]]:
        """The reduced gradient as one piece, zeros where there is none, and which parameters have one here."""
        gradients = [parameter.grad for parameter in self.parameters]
        dtype = next((gradient.dtype for gradient in gradients if gradient is not None), self.shard.dtype)
        piece = torch.zeros_like(self.shard, dtype=dtype)
        for gradient, part in zip(gradients, self.parts(piece), strict=True):
            if gradient is not None:
                part.copy_(gradient)
        return piece, [gradient is not None for gradient in gradients]

    def overwrite_gradient(self, piece: torch.Tensor, present: list[bool]) -> None:
        """Another reduced gradient, copied out of the row that ``piece`` is a slice of."""
        parts = zip(self.parts(piece.clone()), present, strict=True)
        self.assign([part if is_there and part.numel() else None for part, is_there in parts])

    # --- unreduced gradients ---

    @property
    def has_unreduced(self) -> bool:
        """Whether some ``.grad`` is there and has never been reduced."""
        return self._aside is not None and any(parameter.grad is not None for parameter in self.parameters)

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds an unsharded gradient to the unreduced one; a reduced one that is there already is put aside."""
        before = self.take_unreduced()
        if before is not None:
            gradient = before.add_(gradient) if before.dtype is gradient.dtype else before + gradient
        self._aside = [parameter.grad for parameter in self.parameters]
        # Of many parts the whole is held here. That of a flat parameter is its `.grad`, and goes with it.
        self._unreduced = None if self.hides_originals else gradient
        self._version = gradient._version
        parts = zip(self.parameters, self.whole_parts(gradient), strict=True)
        self.assign([part if parameter.requires_grad else None for parameter, part in parts])

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes the unreduced gradient and puts the reduced one, if any, back in its place."""
        if self._aside is None:
            return None
        unreduced = self.parameters[0].grad if self.hides_originals else self._unreduced
        aside, self._aside, self._unreduced = self._aside, None, None
        if unreduced is None:
            return None
        any_left, is_edited = False, unreduced._version != self._version
        for parameter, before, part in zip(self.parameters, aside, self.whole_parts(unreduced), strict=True):
            if parameter.grad is None:
                # zero_grad(), of all or of this one: it was meant for the whole gradient, what was put aside included.
                part.zero_()
                continue
            any_left = True
            if parameter.grad.data_ptr() != part.data_ptr() and parameter.grad.shape == part.shape:
                # The user has assigned another. PyTorch allows one of this size only where nothing is sharded.
                part.copy_(parameter.grad)
            parameter.grad = None
            if before is not None:
                if is_edited and not part.any():
                    # zero_grad(set_to_none=False): it found only what was in sight.
                    before.zero_()
                assign_gradient(parameter, before)
        return unreduced if any_left else None


def assign_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """``parameter.grad = gradient``, also where shape, dtype or device differ.

    PyTorch refuses such an assignment. So for its moment the parameter's data are the gradient's own.
    """
    if gradient.shape == parameter.shape and gradient.dtype is parameter.dtype and gradient.device == parameter.device:
        parameter.grad = gradient
        return
    data = parameter.data
    parameter.data = gradient
    parameter.grad = gradient
    parameter.data = data


def check_uniform_dtype(home: nn.Module, parameters: Mapping[nn.Parameter, OwnedParameter]) -> None:
    """Whether the parameters can be one tensor, which has one dtype, and one that autograd can train.

    Raises:
        ValueError: they have several dtypes, or one of whole numbers.
    """
    kind, dtypes = type(home).__name__, sorted({str(original.dtype) for original in parameters})
    if len(dtypes) > 1:
        raise ValueError(message("mixed-dtypes", type=kind, dtypes=", ".join(dtypes)))
    first = next(iter(parameters))
    if not (first.is_floating_point() or first.is_complex()):
        paths = ", ".join(owned.path for owned in parameters.values())
        raise ValueError(message("integer-parameters", type=kind, dtype=dtypes[0], parameters=paths))


def frozen_among_trained(parameters: Mapping[nn.Parameter, OwnedParameter]) -> list[str]:
    """The names of the frozen parameters, if others are trained; else none."""
    frozen = [owned.path for original, owned in parameters.items() if not original.requires_grad]
    return frozen if len(frozen) < len(parameters) else []
