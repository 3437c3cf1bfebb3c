"""The parameters of a flat unit that the optimizer sees: one flat parameter, or the original parameters.

The memory of a flat unit is the same in both cases: a local shard and an unsharded flat tensor. The difference is the
tensor that is *registered* as a parameter. It determines what ``parameters()`` yields, what an optimizer updates, and
where ``.grad`` is stored:

* ``flat_parameter.py``: the shard is one 1-D parameter of the unit.
* ``originals.py``: the original parameters, each a view of its part of the shard.

Gradients are handled in the same way. Each parameter gets its *part* of a gradient. A flat parameter is the case of one
part. Both kinds of gradients are stored in ``.grad``, but their sizes differ:

* The *reduced* gradient has the size of the shard. It is this rank's shard of the mean over all ranks.
* The *unreduced* gradient comes from a backward inside ``no_sync()``. It has the size of the unsharded unit. It is the
  sum over the micro-batches of this rank alone.

Worked example, a flat parameter of 4 elements on two ranks, two micro-batches, on rank 0 with gradients ``[1 1 1 1]``
(inside ``no_sync``) and ``[2 2 2 2]``, on rank 1 with ``[3 3 3 3]`` and ``[4 4 4 4]``::

    after the first backward    .grad is [1 1 1 1] on rank 0, [3 3 3 3] on rank 1        unreduced
    during the second           [3 3 3 3] and [7 7 7 7] are reduced: sum 10, mean 5
    after it                    .grad is [5 5] on both                                   reduced

The unreduced gradient is stored in ``.grad`` because ``zero_grad()`` must clear it. Otherwise it would be added to the
gradient of the next step. A check before each optimizer step raises an error if ``.grad`` still has the unsharded size
(``optimizer_watch.py``).

*In torch:* ``_flat_param.py`` checks ``use_orig_params`` in more than fifty places; gradients pass through
``_saved_grad_shard``, ``_cpu_grad`` and ``prepare_gradient_for_*``.

Spec: ORIG-01, ORIG-02, ORIG-13, SHARD-06, NOSYNC-02, NOSYNC-05, NOSYNC-10, FWD-07, FWD-08, MP-11, MP-12, STREAM-08.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import nn

from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.messages import message

_REQUIRES_GRAD, _VERSION, _ADDRESS = attrgetter("requires_grad"), attrgetter("_version"), methodcaller("data_ptr")


class Ownership(ABC):
    """The registered parameters of one flat unit, and their gradients.

    Attributes:
        shard: 1-D, this rank's shard in the stored dtype; a parameter itself, or the memory behind several.
        parameters: the parameters that the optimizer updates.
        placeholders: for each original parameter, the tensor that modules refer to while the unit is sharded.
        hides_originals: whether the original parameters are not registered between computations.
        keep_reduce_dtype: whether a reduced gradient may have another dtype than the shard.
    """

    shard: torch.Tensor
    parameters: list[nn.Parameter]
    placeholders: Sequence[torch.Tensor]
    hides_originals: bool
    keep_reduce_dtype: bool
    # The reduced gradients that unreduced ones replace in `.grad`; `None` while there are no unreduced ones.
    _aside: list[torch.Tensor | None] | None = None
    _unreduced: torch.Tensor | None = None
    _version: int = 0

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trained. The user may change this at any time."""
        return any(map(_REQUIRES_GRAD, self.parameters))

    def parts(self, local_shard: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``local_shard``, as views. A single part is ``local_shard`` itself."""
        return [local_shard]

    def whole_parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``row``, an unsharded flat tensor with padding."""
        return [row]

    @abstractmethod
    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters with the values ``views``, for the modules inside ``summon_full_params``."""

    @abstractmethod
    def hide_full(self) -> None:
        """Ends `use_full_params`."""

    # --- values ---

    def collect(self) -> bool:
        """Copies values into the shard that the user has put into other memory. Returns whether there were any."""
        return False

    def refresh_from_module(self) -> None:  # noqa: B027
        """Adapts the shard if its parameters have another dtype or device now, for instance after ``model.half()``."""

    def overwrite(self, local_shard: torch.Tensor) -> None:
        """Writes new values into the shard. `stamp` differs afterwards."""
        with torch.no_grad():
            self.shard.copy_(local_shard)
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""
        return list(map(_VERSION, self.parameters)), list(map(_ADDRESS, self.parameters))

    # --- reduced gradients ---

    def assign(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Sets the ``.grad`` of each parameter."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None
            if gradient is not None:
                assign_gradient(parameter, gradient)

    def add_reduced(self, local_shard: torch.Tensor) -> None:
        """Adds a reduced gradient to ``.grad`` of the trained parameters."""
        if local_shard.dtype is not self.shard.dtype and not self.keep_reduce_dtype:
            local_shard = local_shard.to(self.shard.dtype)
        for parameter, part in zip(self.parameters, self.parts(local_shard), strict=True):
            # An original parameter without elements on this rank gets no gradient here.
            if not parameter.requires_grad or (part.numel() == 0 and not self.hides_originals):
                continue
            if parameter.grad is None:
                assign_gradient(parameter, part)
            else:
                parameter.grad.add_(part)
            # Autograd did not accumulate this gradient, so it does not call the post-accumulate hooks.
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def reduced_gradient(self) -> tuple[torch.Tensor, list[bool]]:
        """The reduced gradient as one tensor, with zeros where it is missing, and which parameters have one here."""
        gradients = [parameter.grad for parameter in self.parameters]
        dtype = next((gradient.dtype for gradient in gradients if gradient is not None), self.shard.dtype)
        local_shard = torch.zeros_like(self.shard, dtype=dtype)
        for gradient, part in zip(gradients, self.parts(local_shard), strict=True):
            if gradient is not None:
                part.copy_(gradient)
        return local_shard, [gradient is not None for gradient in gradients]

    def overwrite_gradient(self, local_shard: torch.Tensor, present: list[bool]) -> None:
        """Replaces the reduced gradient by a copy of ``local_shard``, which may be a view of an unsharded tensor."""
        parts = zip(self.parts(local_shard.clone()), present, strict=True)
        self.assign([part if is_there and part.numel() else None for part, is_there in parts])

    # --- unreduced gradients ---

    @property
    def has_unreduced(self) -> bool:
        """Whether there is a ``.grad`` that was not reduced."""
        return self._aside is not None and any(parameter.grad is not None for parameter in self.parameters)

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds ``gradient`` to the unreduced gradient, and keeps an existing reduced gradient elsewhere meanwhile."""
        before = self.take_unreduced()
        if before is not None:
            gradient = before.add_(gradient) if before.dtype is gradient.dtype else before + gradient
        self._aside = [parameter.grad for parameter in self.parameters]
        # With several parts, this attribute holds the gradient. A flat parameter holds it in `.grad` only.
        self._unreduced = None if self.hides_originals else gradient
        self._version = gradient._version
        parts = zip(self.parameters, self.whole_parts(gradient), strict=True)
        self.assign([part if parameter.requires_grad else None for parameter, part in parts])

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes and returns the unreduced gradient, and restores the reduced one in ``.grad``, if any."""
        if self._aside is None:
            return None
        unreduced = self.parameters[0].grad if self.hides_originals else self._unreduced
        aside, self._aside, self._unreduced = self._aside, None, None
        if unreduced is None:
            return None
        any_left, is_edited = False, unreduced._version != self._version
        for parameter, before, part in zip(self.parameters, aside, self.whole_parts(unreduced), strict=True):
            if parameter.grad is None:
                # zero_grad(), of all or of this one. It clears the reduced gradient, too.
                part.zero_()
                continue
            any_left = True
            if parameter.grad.data_ptr() != part.data_ptr() and parameter.grad.shape == part.shape:
                # The user has assigned another gradient. PyTorch allows this size only if nothing is sharded.
                part.copy_(parameter.grad)
            parameter.grad = None
            if before is not None:
                if is_edited and not part.any():
                    # zero_grad(set_to_none=False): it has cleared only the unreduced gradient.
                    before.zero_()
                assign_gradient(parameter, before)
        return unreduced if any_left else None


def assign_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """``parameter.grad = gradient``, even if shape, dtype or device differ.

    PyTorch rejects such an assignment. So ``parameter.data`` is set to the gradient during the assignment.
    """
    if gradient.shape == parameter.shape and gradient.dtype is parameter.dtype and gradient.device == parameter.device:
        parameter.grad = gradient
        return
    data = parameter.data
    parameter.data = gradient
    parameter.grad = gradient
    parameter.data = data


def check_uniform_dtype(home: nn.Module, parameters: Mapping[nn.Parameter, ParamInfo]) -> None:
    """Checks that the parameters can be one flat tensor: they have one dtype, and autograd supports it.

    Raises:
        ValueError: the parameters have several dtypes, or an integer dtype.
    """
    kind, dtypes = type(home).__name__, sorted({str(original.dtype) for original in parameters})
    if len(dtypes) > 1:
        raise ValueError(message("mixed-dtypes", type=kind, dtypes=", ".join(dtypes)))
    first = next(iter(parameters))
    if not (first.is_floating_point() or first.is_complex()):
        paths = ", ".join(owned.path for owned in parameters.values())
        raise ValueError(message("integer-parameters", type=kind, dtype=dtypes[0], parameters=paths))


def frozen_among_trained(parameters: Mapping[nn.Parameter, ParamInfo]) -> list[str]:
    """The names of the frozen parameters if other parameters are trained; empty otherwise."""
    frozen = [owned.path for original, owned in parameters.items() if not original.requires_grad]
    return frozen if len(frozen) < len(parameters) else []
