"""Evaluation in full precision, training in low precision (``FSDP_USE_FULL_PREC_IN_EVAL=1``).

A program trains in bfloat16, and evaluates in the dtype in which the parameters are stored::

    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model(x).float().sum().backward()                           # bfloat16
    model.eval()
    with torch.no_grad():
        model(x)                                                # float32
    model.train()

Without this case, the evaluation rounds the parameters to bfloat16. Programs for older torch versions set the
environment variable before they create the model.

The outermost forward calls `choose_precision`. A unit whose wrapped module is in evaluation mode gets a second
unsharded tensor, in the stored dtype. Between a recorded forward and its backward, another forward may change the
precision of a unit. So each forward calls `restore_in_backward`, and its backward uses the precision of the forward.

*In torch:* the same variable; ``_use_full_prec_in_eval`` of ``FlatParamHandle``.

Spec: FRESH-08.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch

from minifsdp.cases.buffer_dtypes import cast_buffers
from minifsdp.engine.backward_hooks import register_pre_backward_hook


def is_on() -> bool:
    """Whether wrappers that are created now compute in full precision in evaluation mode."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def choose_precision(wrappers: Iterable[Any]) -> None:
    """Selects full precision for modules in evaluation mode, and low precision for the other modules."""
    for wrapper in wrappers:
        cast_buffers(wrapper)
        if wrapper._unit is not None:
            _use_stored_dtype(wrapper._unit, not wrapper.module.training)


def restore_in_backward(wrappers: Iterable[Any], output: Any, inputs: Any) -> None:
    """Called after a forward: its backward computes in the precision of this forward, whatever runs in between.

    Args:
        wrappers: the wrapper that has run, and those inside it.
        output, inputs: of the wrapped module. If the output is None, the hook is on the inputs.
    """
    recorded = [
        (wrapper._unit, wrapper._unit.layout.is_stored)
        for wrapper in wrappers
        if wrapper._unit is not None
    ]

    def restore(gradient: torch.Tensor) -> None:
        for unit, stored in recorded:
            _use_stored_dtype(unit, stored)

    register_pre_backward_hook(output, restore, inputs=inputs)


def _use_stored_dtype(unit: Any, stored: bool) -> None:
    if unit.layout.is_stored is not stored:
        unit.reshard()
        unit.layout.use_stored_dtype(stored)
        unit.plan_reductions()
        if stored:
            unit.plans[0].use(unit.layout.dtype)
