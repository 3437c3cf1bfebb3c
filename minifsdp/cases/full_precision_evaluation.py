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
unsharded tensor, in the stored dtype. A forward in evaluation mode between a recorded forward and its backward may
change the precision of a unit. So after it, a unit that waits for its backward gets the precision of the recorded
forward again.

*In torch:* the same variable; ``_use_full_prec_in_eval`` of ``FlatParamHandle``.

Spec: FRESH-08.
"""

import os
from collections.abc import Iterable
from typing import Any

from minifsdp.cases.buffer_dtypes import cast_buffers


def is_on() -> bool:
    """Whether wrappers that are created now compute in full precision in evaluation mode."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def choose_precision(wrappers: Iterable[Any], *, for_backward: bool = False) -> None:
    """Selects full precision for modules in evaluation mode. An earlier recorded forward keeps its precision.

    Args:
        wrappers: the wrappers of the model.
        for_backward: whether this is the end of a forward without a graph; units then get the precision that their
            backward needs.
    """
    for wrapper in wrappers:
        cast_buffers(wrapper)
        unit = wrapper._unit
        stored = not wrapper.module.training
        if unit is not None and for_backward and unit.uses.awaits_backward:
            stored = unit.layout.is_recorded_stored
        if unit is not None and unit.layout.is_stored is not stored:
            unit.reshard()
            unit.layout.use_stored_dtype(stored)
            unit.plan_reductions()
            if stored:
                unit.plans[0].use(unit.layout.dtype)
