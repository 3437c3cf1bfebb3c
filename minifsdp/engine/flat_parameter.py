"""The flat parameter: a unit's shard as one parameter, and the gradient that the optimizer finds there.

The stored shard is one 1-D tensor. The plain way to give it to an optimizer is as one parameter, the *flat parameter*,
registered on the unit's module under the name ``_flat_param``. The original parameters are then gone from
``named_parameters()``; in their places modules show an `AbsentParameter` until the unit is gathered.

Gradients come in two sizes, and both are found under the same ``.grad``:

* the *reduced* one has the size of the shard: the mean over all ranks, this rank's slice;
* the *unreduced* one, left behind by a backward inside ``no_sync()``, has the size of the whole unit: a sum over the
  micro-batches of this rank alone, for which no slice is known yet.

Worked example, one unit of 4 elements on two ranks, two micro-batches on rank 0 with gradients ``[1 1 1 1]`` (inside
``no_sync``) and ``[2 2 2 2]``, on rank 1 with ``[3 3 3 3]`` and ``[4 4 4 4]``::

    after the first backward    .grad is [1 1 1 1] on rank 0, [3 3 3 3] on rank 1        unreduced
    during the second           [3 3 3 3] and [7 7 7 7] are reduced: sum 10, mean 5
    after it                    .grad is [5 5] on both                                   reduced

Why show the unreduced gradient at all, and not keep it out of sight? Because ``zero_grad()`` must find it. A sum that
cannot be cleared would leak into the next step.

The optimizer is told before it can trip over the difference in size (see ``optimizer_watch.py``).

*In torch:* ``FlatParameter`` does the same with ``_saved_grad_shard``, ``_cpu_grad`` and ``prepare_gradient_for_*``.

Spec: ORIG-01, SHARD-06, NOSYNC-02, NOSYNC-05, NOSYNC-10, FWD-07, FWD-08, MP-11, MP-12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from minifsdp.engine import misuse, optimizer_watch
from minifsdp.engine.absent import AbsentParameter
from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message
from minifsdp.engine.ownership import Ownership, assign_gradient, call_hooks

FLAT_NAME = "_flat_param"


class FlatOwnership(Ownership):
    """The shard as one parameter.

    Args:
        home: the unit's module; the flat parameter is registered there.
        parameters: what it is made of; afterwards nothing here holds on to the originals.
        shard: 1-D, this rank's slice, in the dtype and on the device where it is stored.
        keep_reduce_dtype: whether a reduced gradient may stay in another dtype than the shard's.

    Attributes:
        shard: the flat parameter itself.
        hides_originals: whether the original parameters are out of sight between computations; here they are.
        stand_ins: what to show in place of each original parameter while the unit is sharded.
    """

    hides_originals = True

    def __init__(
        self,
        home: nn.Module,
        parameters: Mapping[nn.Parameter, OwnedParameter],
        shard: torch.Tensor,
        keep_reduce_dtype: bool,
    ) -> None:
        self.home, self.keep_reduce_dtype = home, keep_reduce_dtype
        self.shard: nn.Parameter = nn.Parameter(shard, requires_grad=next(iter(parameters)).requires_grad)
        # What torch's FlatParameter is known by: to isinstance, and to frameworks that look into an optimizer.
        self.shard._is_flat_param = True  # type: ignore[attr-defined]
        self.shard._fsdp_flattened = True  # type: ignore[attr-defined]
        self._is_unreduced, self._version = False, 0
        self._reduced_before: torch.Tensor | None = None
        stand_ins: list[torch.Tensor] = []
        for original, owned in parameters.items():
            misuse.note_taken(original, owned.path, is_replaced=True)
            stand_ins.append(AbsentParameter(original.shape, original.dtype, original.device, owned.path))
            for slot in owned.slots:
                delattr(slot.module, slot.name)
                setattr(slot.module, slot.name, stand_ins[-1])
        self.stand_ins = stand_ins
        home.register_parameter(FLAT_NAME, self.shard)
        misuse.note_flattened(home, FLAT_NAME)

    def dictionary(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Where to write what a module shall show: past ``_parameters``, so that only the flat parameter is listed."""
        return module.__dict__

    def local_parameters(self) -> list[nn.Parameter]:
        """What the optimizer owns: the flat parameter."""
        return [self.shard]

    @property
    def has_unreduced(self) -> bool:
        """Whether ``.grad`` is there and has never been reduced."""
        return self._is_unreduced and self.shard.grad is not None

    @property
    def requires_grad(self) -> bool:
        """Whether the unit is to be trained; the user may change it on the flat parameter at any time."""
        return self.shard.requires_grad

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the shard's values are changed in place or its memory is replaced."""
        return self.shard._version, self.shard.data_ptr()

    def settle(self) -> None:
        """Nothing to do: the flat parameter is the shard."""

    def overwrite(self, piece: torch.Tensor) -> None:
        """New values for the shard. The change is one that `stamp` shows."""
        with torch.no_grad():
            self.shard.copy_(piece)

    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters for ``views``; the flat parameter is not listed while modules show them."""
        del self.home._parameters[FLAT_NAME]
        return [nn.Parameter(view, requires_grad=self.requires_grad) for view in views]

    def hide_full(self) -> None:
        """The flat parameter is listed again."""
        self.home.register_parameter(FLAT_NAME, self.shard)

    def collect(self) -> bool:
        """Nothing to do: the flat parameter is looked up afresh for each gather, wherever its memory is."""
        return False

    def add_reduced(self, piece: torch.Tensor) -> None:
        """Adds this rank's piece of a reduced gradient to what the optimizer will see; nothing, if frozen by now."""
        if not self.shard.requires_grad:
            return
        if piece.dtype is not self.shard.dtype and not self.keep_reduce_dtype:
            piece = piece.to(self.shard.dtype)
        before = self.shard.grad
        if before is None:
            assign_gradient(self.shard, piece)
        else:
            before.add_(piece)
        if self.shard._post_accumulate_grad_hooks:
            call_hooks(self.shard)

    def reduced_gradient(self) -> tuple[torch.Tensor, list[bool]]:
        """Not here: asked for only where single parameters are visible."""
        raise NotImplementedError

    def overwrite_gradient(self, piece: torch.Tensor, present: list[bool]) -> None:
        """Not here either."""
        self.reduced_gradient()

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds an unsharded gradient to the unreduced one; a reduced one that is there already is put aside."""
        before = self.take_unreduced()
        if before is not None:
            gradient = before.add_(gradient)
        self._reduced_before = self.shard.grad
        assign_gradient(self.shard, gradient)
        self._is_unreduced, self._version = True, gradient._version
        optimizer_watch.note_unreduced(self)

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes the unreduced gradient and puts the reduced one, if any, back in its place."""
        if not self._is_unreduced:
            return None
        self._is_unreduced = False
        unreduced, reduced = self.shard.grad, self._reduced_before
        self._reduced_before = None
        # None here means zero_grad(): it was meant for the whole gradient, the part put aside included.
        if unreduced is not None:
            self.shard.grad = None
            if reduced is not None:
                if unreduced._version != self._version and not unreduced.any():
                    # zero_grad(set_to_none=False): it found only what was in sight.
                    reduced.zero_()
                assign_gradient(self.shard, reduced)
        return unreduced


def check_uniform_training(home: nn.Module, parameters: Mapping[nn.Parameter, OwnedParameter]) -> None:
    """One flat parameter is trained or not as a whole.

    Raises:
        ValueError: some of the parameters are frozen and some are not, with the names on both sides.
    """
    trained = [owned.path for original, owned in parameters.items() if original.requires_grad]
    frozen = [owned.path for original, owned in parameters.items() if not original.requires_grad]
    if trained and frozen:
        raise ValueError(message("mixed-requires-grad", type=type(home).__name__, trained=trained, frozen=frozen))
