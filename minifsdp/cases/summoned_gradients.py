"""Gradients inside ``summon_full_params(with_grads=True)``.

Outside of the context, ``.grad`` is this rank's shard of the reduced gradient. A program that compares or changes whole
gradients needs them in the shape of the parameters::

    loss = model(x).sum()                       # FSDP(Linear(2, 2), use_orig_params=True), two ranks
    loss.backward()                             # weight.grad: 3 elements on rank 0, 1 element on rank 1
    with FSDP.summon_full_params(model, with_grads=True):
        weight = model.module.weight
        weight.grad -= weight.grad.mean()       # shape (2, 2) on both ranks
    optimizer.step()                            # with the changed gradient

Without this case, ``weight.grad`` is ``None`` inside the context. ``training.py`` passes `SummonedGradients` to
`summoned` if the user sets ``with_grads``.

A parameter has a gradient inside the context if any rank has one for its elements, because a rank without elements of a
parameter has no gradient of it. So the ranks count them with one all-reduce. At the end, each rank writes back its own
shard, as for the parameters. Setting ``.grad`` to ``None`` removes the gradient.

*In torch:* ``unshard_grad`` in ``_flat_param.py`` counts the ranks with a gradient once for the whole unit, so a
parameter without a gradient gets zeros if another parameter of its unit has one.

Spec: SUMMON-15.
"""

from collections.abc import Sequence

import torch
from torch import nn

from minifsdp.checks import ownership
from minifsdp.engine import collectives
from minifsdp.engine.flat_params import assign_gradients
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import all_gather_unit, copy_replaced


class SummonedGradients:
    """The unsharded reduced gradients of a unit. All ranks of its shard group must construct it.

    Args:
        unit: the unit.
    """

    @staticmethod
    def check(units: Sequence[FlatUnit], *, offload_to_cpu: bool) -> None:
        """Checks that the units have gradients of individual parameters, and that these are reduced.

        Raises:
            NotImplementedError: for ``offload_to_cpu``, or if there are no gradients of individual parameters.
            RuntimeError: if there are gradients that were never reduced.
        """
        if offload_to_cpu:
            raise NotImplementedError(message("summon-grads-offload"))
        for unit in units:
            if not unit.layout.use_orig_params:
                raise NotImplementedError(message("summon-no-grads", unit=unit.name))
        ownership.check_reduced(
            "summon_full_params(with_grads=True)", [unit.layout for unit in units]
        )

    def __init__(self, unit: FlatUnit) -> None:
        self._layout = layout = unit.layout
        gradients = [parameter.grad for parameter in layout.local_parameters]
        # With ``keep_low_precision_grads``, gradients have another dtype than the parameters.
        dtypes = (gradient.dtype for gradient in gradients if gradient is not None)
        shard = torch.zeros_like(layout.registered.shard, dtype=next(dtypes, None))
        for gradient, part in zip(
            gradients, layout.registered.parts(shard), strict=True
        ):
            if gradient is not None:
                part.copy_(gradient)
        self._flat = all_gather_unit(unit, shard)
        votes = torch.tensor(
            [gradient is not None for gradient in gradients],
            dtype=torch.int32,
            device=layout.device,
        )
        if layout.mesh.shard is not None:
            collectives.all_reduce(layout.mesh.shard, votes).wait()
        self._present = [vote > 0 for vote in votes.tolist()]

    @outside_inference_mode
    def assign(self, full_params: Sequence[nn.Parameter]) -> None:
        """Sets ``.grad`` of the full parameters."""
        views = zip(self._layout.views_of(self._flat), self._present, strict=True)
        assign_gradients(
            full_params, [view if is_present else None for view, is_present in views]
        )

    def write_back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replaces the reduced gradients by this rank's shard of ``gradients``."""
        layout = self._layout
        copy_replaced(layout.views_of(self._flat), gradients)
        parts = layout.registered.parts(self._flat[layout.shard_range].clone())
        kept = (
            part if gradient is not None and part.numel() else None
            for part, gradient in zip(parts, gradients, strict=True)
        )
        assign_gradients(layout.local_parameters, kept)
