"""What the optimizer owns of a flat unit: the contract, with two answers.

The memory of a flat unit is the same in any case: a slice here, a long tensor there. What differs is what is
*registered* as a parameter, and therefore what ``parameters()`` yields, what an optimizer steps on and where ``.grad``
is found:

* ``flat_parameter.py``: the slice as a whole, one 1-D parameter for the unit;
* ``originals.py``: the original parameters, each showing its part of the slice.

The flat layout asks one of them and does not care which.

*In torch:* ``use_orig_params`` is a question that is asked in more than fifty places of ``_flat_param.py``.

Spec: ORIG-01, ORIG-02, STREAM-08.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message


class Ownership(ABC):
    """What the optimizer owns of one flat unit.

    Attributes:
        shard: 1-D, this rank's slice in the stored dtype; a parameter itself, or the memory behind several.
        keep_reduce_dtype: whether a reduced gradient may stay in another dtype than the shard's.
        stand_ins: for each original parameter what to show in its place while the unit is not gathered.
        hides_originals: whether the original parameters are out of sight between computations.
    """

    shard: torch.Tensor
    keep_reduce_dtype: bool
    stand_ins: Sequence[torch.Tensor]
    hides_originals: bool

    # --- what is registered ---

    @abstractmethod
    def dictionary(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Where to write what ``module`` shall show under a parameter's name."""

    @abstractmethod
    def local_parameters(self) -> list[nn.Parameter]:
        """What the optimizer owns."""

    @property
    @abstractmethod
    def requires_grad(self) -> bool:
        """Whether anything here is to be trained; the user may change it at any time."""

    @abstractmethod
    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters that show ``views``, to be put on the modules for a while."""

    @abstractmethod
    def hide_full(self) -> None:
        """The end of `show_full`."""

    # --- values ---

    @abstractmethod
    def collect(self) -> bool:
        """Fetches into the shard what the user has put elsewhere, if anything; called before the shard is used."""

    @abstractmethod
    def settle(self) -> None:
        """Adapts the shard to another dtype or device that its parameters have been given, as by ``model.half()``."""

    @abstractmethod
    def overwrite(self, piece: torch.Tensor) -> None:
        """New values for the shard. The change is one that `stamp` shows."""

    @abstractmethod
    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""

    # --- gradients ---

    @abstractmethod
    def add_reduced(self, piece: torch.Tensor) -> None:
        """Adds this rank's piece of a reduced gradient to what the optimizer will see."""

    @abstractmethod
    def reduced_gradient(self) -> tuple[torch.Tensor, list[bool]]:
        """The reduced gradient as one piece, zeros where there is none, and which parameters have one here.

        Raises:
            NotImplementedError: gradients of single parameters are not kept apart.
        """

    @abstractmethod
    def overwrite_gradient(self, piece: torch.Tensor, present: list[bool]) -> None:
        """New values for the reduced gradient."""

    @abstractmethod
    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds an unsharded gradient to the unreduced one; a reduced one that is there already is put aside."""

    @abstractmethod
    def take_unreduced(self) -> torch.Tensor | None:
        """Removes the unreduced gradient and puts the reduced one, if any, back in its place."""

    @property
    @abstractmethod
    def has_unreduced(self) -> bool:
        """Whether ``.grad`` is there and has never been reduced."""


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


def call_hooks(parameter: nn.Parameter) -> None:
    """Calls the user's hooks that wait for the gradient. Autograd did not put it there, so nothing else does."""
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` as the user's hooks on a flat parameter leave it; autograd owns another tensor and calls none."""
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def check_uniform_dtype(home: nn.Module, parameters: Mapping[nn.Parameter, OwnedParameter]) -> None:
    """One tensor has one dtype, and autograd knows what to do with it.

    Raises:
        ValueError: the parameters have several, or it is one of whole numbers.
    """
    dtypes = sorted({str(original.dtype) for original in parameters})
    whole = [o.path for p, o in parameters.items() if not (p.is_floating_point() or p.is_complex())]
    if whole and len(dtypes) == 1:
        raise ValueError(
            message("integer-parameters", type=type(home).__name__, dtype=dtypes[0], parameters=", ".join(whole))
        )
    if len(dtypes) > 1:
        raise ValueError(message("mixed-dtypes", type=type(home).__name__, dtypes=", ".join(dtypes)))
