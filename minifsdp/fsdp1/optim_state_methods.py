"""The methods of a wrapper that write and read the optimizer's state."""

from __future__ import annotations

from minifsdp.fsdp1.base import WrapperBase


class OptimStateMethods(WrapperBase):
    """Writing and reading the optimizer's state."""
