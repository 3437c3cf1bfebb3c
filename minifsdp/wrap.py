"""Wrapping policies at the same import path as in torch: ``from minifsdp.wrap import ModuleWrapPolicy``.

The code and its documentation are in ``fsdp1/wrap.py``. ``_recursive_wrap`` is torch's own
function: it wraps the modules that a policy chooses with any class.

Spec: WRAP-02 to WRAP-16, LEGACY-02, NEW-02, NEW-03.
"""

# `__all__` below lists the exported names.
# ruff: noqa: F403, F405

from torch.distributed.fsdp.wrap import _recursive_wrap as _recursive_wrap

from minifsdp.fsdp1.wrap import *
from minifsdp.fsdp1.wrap import _module_wrap_policy, _or_policy, _Policy

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_module_wrap_policy",
    "_or_policy",
    "always_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
