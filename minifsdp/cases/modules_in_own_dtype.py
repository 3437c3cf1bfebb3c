"""Modules that compute in full precision inside a model of low precision.

Batch norms are inaccurate in low precision. With a `MixedPrecision`, an auto-wrap policy makes them units without mixed
precision. The modules around them still compute in low precision::

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    model(x)            # bfloat16 -> BatchNorm1d in float32 -> bfloat16

Without this case, the batch norm gets a bfloat16 input for its float32 parameters, and returns an output in a dtype
that the next layer rejects. `compute_in_own_dtype` registers two hooks: one casts the inputs to the dtype of the
module, the other casts the output back. `auto_wrap` calls it for each module that it sets apart.

*In torch:* ``_override_module_mixed_precision`` in ``_common_utils.py`` registers such hooks.

Spec: MP-19, MP-20, MP-21.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minifsdp.cases.containers import cast_floating
from minifsdp.engine.precision import tensors_in


@dataclass
class _OwnDtype:
    """Hooks that run one module in its own dtype inside a model that computes in a lower precision."""

    dtype: torch.dtype
    outside: torch.dtype | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtypes = {
            t.dtype: None for t in tensors_in((args, kwargs)) if t.is_floating_point()
        }
        # Cast the output back only if an input was cast. Keep a dtype change by the module itself.
        self.outside = next(
            (dtype for dtype in dtypes if dtype is not self.dtype), None
        )
        return cast_floating(self.dtype, args), cast_floating(self.dtype, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.outside is None else cast_floating(self.outside, output)


def compute_in_own_dtype(module: nn.Module) -> None:
    """Registers hooks that cast the inputs of ``module`` to its own dtype, and its output back."""
    tensors = [*module.parameters(), *module.buffers()]
    hooks = _OwnDtype(
        next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    )
    module.register_forward_pre_hook(hooks.before, with_kwargs=True)
    module.register_forward_hook(hooks.after)
