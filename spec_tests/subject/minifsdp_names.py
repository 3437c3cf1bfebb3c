"""The adapter for minifsdp: its names are those of torch."""

# A test finds these names as attributes of this module.
# ruff: noqa: F401, F403

from minifsdp import *
from minifsdp import __all__, trace, wrap
from minifsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
