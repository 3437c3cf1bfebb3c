"""``DistributedDataParallel`` around a module of ``fully_shard``: an error in its constructor.

A script for one node wraps its model in DDP, and the model already calls ``fully_shard``::

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            for block in self.blocks:
                fully_shard(block)
            fully_shard(self)

    model = DistributedDataParallel(Model())

Without this case, DDP broadcasts the parameters, and DTensor raises an error about ``c10d.broadcast_``, which does not
name the cause. With ``init_sync=False``, the first forward raises the error, see ``checks/forward_checks.py``.

The case is a line of ``added_methods.py``: it has an attribute that DDP reads first.

*In torch:* the error about ``c10d.broadcast_``.

Spec: PROG-07.
"""

from collections.abc import Iterator
from typing import Any

from minifsdp.engine.layout import full_name
from minifsdp.engine.messages import message
from minifsdp.fsdp2.fsdp_state import states_in


class _Ignored:
    """The list of ignored parameters that `DistributedDataParallel` reads first. The user can replace the list."""

    def __get__(self, module: Any, owner: type | None = None) -> Iterator[str]:
        """Returns a new iterator. It raises an error when the first name is read, so the attribute itself exists."""
        units = (
            [state.unit for _, state in states_in(module) if state.unit]
            if module is not None
            else []
        )
        for unit in units:
            name = full_name(unit.layout.name, unit.layout.param_infos[0].path)
            mesh = unit.plans[0].mesh
            group = mesh.shard or mesh.replicate
            raise RuntimeError(
                message("ddp-around", name=name, ranks=group and group.ranks)
            )
        yield from ()


class RefusesDDP:
    """A module with the attribute of its parameters that DDP ignores."""

    _ddp_params_and_buffers_to_ignore = _Ignored()
