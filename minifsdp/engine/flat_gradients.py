"""The gradients of a flat unit, in ``.grad`` of its registered parameters.

Both kinds of gradients are stored in ``.grad``, but their sizes differ:

* The *reduced* gradient has the size of the shard. It is this rank's shard of the mean over all ranks.
* The *unreduced* gradient comes from a backward inside ``no_sync()``. It has the size of the unsharded unit. It is the
  sum over the micro-batches of this rank only.

Each registered parameter gets its part of a gradient. With a flat parameter, there is one part.

Worked example: a flat parameter of 4 elements on two ranks, and two micro-batches, the first inside ``no_sync``. Their
gradients are ``[1 1 1 1]`` and ``[2 2 2 2]`` on rank 0, ``[3 3 3 3]`` and ``[4 4 4 4]`` on rank 1::

    after the first backward    .grad is [1 1 1 1] on rank 0, [3 3 3 3] on rank 1        unreduced
    during the second           [3 3 3 3] and [7 7 7 7] are reduced: sum 10, mean 5
    after it                    .grad is [5 5] on both                                   reduced

The unreduced gradient is stored in ``.grad`` because ``zero_grad()`` must clear it. Otherwise it would be added to the
gradient of the next step. ``minifsdp/checks/optimizer_checks.py`` raises an error if an optimizer step finds an
unreduced gradient.

*In torch:* gradients pass through ``_saved_grad_shard``, ``_cpu_grad`` and ``prepare_gradient_for_*``.

Spec: SHARD-06, NOSYNC-02, NOSYNC-05, NOSYNC-10, FWD-07, FWD-08, MP-11, MP-12, ORIG-13, STREAM-08.
"""

import torch

from minifsdp.engine.flat_params import (
    RegisteredParams,
    assign_gradient,
    assign_gradients,
)
from minifsdp.engine.layout import users_hooks


class FlatGradients:
    """The reduced and unreduced gradients of the registered parameters of one unit.

    Args:
        registered: the parameters.
    """

    def __init__(self, registered: RegisteredParams) -> None:
        self._registered = registered
        self._parameters = registered.parameters
        # The reduced gradients, while unreduced gradients replace them in `.grad`; otherwise `None`.
        self._reduced: list[torch.Tensor | None] | None = None
        self._unreduced: torch.Tensor | None = None
        self._version = 0
        # Which parts of the unreduced gradient were not zero, for parameters with a reduced gradient.
        self._had_values: list[bool | torch.Tensor] = []

    # --- reduced gradients ---

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds a shard of a reduced gradient to ``.grad`` of the trained parameters."""
        for parameter, part in zip(
            self._parameters, self._registered.parts(shard), strict=True
        ):
            # An original parameter without elements on this rank gets no gradient.
            if not parameter.requires_grad or (part is not shard and 0 in part.shape):
                continue
            if parameter.grad is None:
                assign_gradient(parameter, part)
            else:
                parameter.grad.add_(part)
            # Autograd did not accumulate this gradient, so it does not call the post-accumulate hooks.
            hooks = parameter._post_accumulate_grad_hooks
            for _, hook in users_hooks(hooks) if hooks else ():
                hook(parameter)

    # --- unreduced gradients ---

    @property
    def has_unreduced(self) -> bool:
        """Whether there is a ``.grad`` that was not reduced."""
        return self._reduced is not None and any(
            parameter.grad is not None for parameter in self._parameters
        )

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds ``gradient`` to the unreduced gradient. Stores an existing reduced gradient elsewhere meanwhile."""
        before = self.take_unreduced()
        if before is not None:
            gradient = (
                before.add_(gradient)
                if before.dtype is gradient.dtype
                else before + gradient
            )
        self._reduced = [parameter.grad for parameter in self._parameters]
        parts = self._registered.unsharded_parts(gradient)
        # With several parts, this attribute holds the gradient. With a flat parameter, only `.grad` holds it.
        self._unreduced = None if parts[0] is gradient else gradient
        self._version = gradient._version
        self._had_values = [
            old is not None and part.any()
            for old, part in zip(self._reduced, parts, strict=True)
        ]
        pairs = zip(self._parameters, parts, strict=True)
        assign_gradients(
            self._parameters,
            [part if parameter.requires_grad else None for parameter, part in pairs],
        )

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes and returns the unreduced gradient, and restores the reduced one in ``.grad``, if any."""
        if self._reduced is None:
            return None
        unreduced = (
            self._parameters[0].grad if self._unreduced is None else self._unreduced
        )
        reduced = self._reduced
        self._reduced = None
        self._unreduced = None
        if unreduced is None:
            return None
        any_left = False
        is_edited = unreduced._version != self._version
        parts = self._registered.unsharded_parts(unreduced)
        for parameter, before, part, had_values in zip(
            self._parameters, reduced, parts, self._had_values, strict=True
        ):
            if parameter.grad is None:
                # zero_grad() was called for all parameters or for this one. It also clears the reduced gradient.
                part.zero_()
                continue
            any_left = True
            if (
                parameter.grad.data_ptr() != part.data_ptr()
                and parameter.grad.shape == part.shape
            ):
                # The user has assigned another gradient. PyTorch allows this size only if the unit is not sharded.
                part.copy_(parameter.grad)
            parameter.grad = None
            if before is not None:
                if is_edited and not (part if had_values else unreduced).any():
                    # zero_grad(set_to_none=False) has cleared only the unreduced gradient.
                    before.zero_()
                assign_gradient(parameter, before)
        return unreduced if any_left else None
