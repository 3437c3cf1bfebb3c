"""Private names of torch's ``fully_shard`` that libraries read, as far as they mean something here.

Libraries that do not want to shard twice ask PyTorch what it knows of a module, and read a few names of the answer::

    state = torch.distributed._composable_state._get_module_state(module)
    if state is not None:                               # sharded already
        group = state._fsdp_param_group                 # None if it was left no parameters
        dtype = group and group._reduce_dtype

Worked example, ``fully_shard(block)`` and ``fully_shard(model)`` with ``reduce_dtype=float32`` under bfloat16. Both
modules have a state whose group says float32; ``_is_root`` is ``None`` on both until the first forward, then ``True``
for ``model`` and ``False`` for ``block``. A module inside of ``block`` has none: the call was not made on it.

The answer is what ``fully_shard`` itself keeps for the module, and costs nothing until it is asked.

*In torch:* ``FSDPState`` and ``FSDPParamGroup``, of which these are a few attributes.

Spec: FS2-29.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed._composable_state import _State

from minifsdp.engine.root import Root
from minifsdp.engine.unit import Unit

if TYPE_CHECKING:
    from minifsdp.fsdp2.options import MixedPrecisionPolicy


@dataclass(frozen=True)
class _ParamGroup:
    """What is read of a unit.

    Attributes:
        mp_policy: the user's.
    """

    _unit: Unit
    mp_policy: MixedPrecisionPolicy

    @property
    def _orig_dtype(self) -> torch.dtype | None:
        """Of the stored parameters that are trained."""
        return next((p.dtype for p in self._unit.layout.local_parameters() if p.requires_grad), None)

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """In which gradients travel, where that is another dtype than the one in which they are computed."""
        reduce, is_trained = self.mp_policy.reduce_dtype, self._unit.layout.is_trained
        return reduce if is_trained and reduce is not self.mp_policy.param_dtype else None


class FrameworkNames(_State):
    """The private names of what ``fully_shard`` keeps for a module. The base is what PyTorch's registry holds."""

    unit: Unit | None
    policy: MixedPrecisionPolicy
    tree: Root | None
    is_tree_root: bool

    @property
    def _is_root(self) -> bool | None:
        return None if self.tree is None else self.is_tree_root

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.policy

    @property
    def _fsdp_param_groups(self) -> list[_ParamGroup]:
        return [] if self.unit is None else [_ParamGroup(self.unit, self.policy)]

    @property
    def _fsdp_param_group(self) -> _ParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)
