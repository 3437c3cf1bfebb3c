"""``set_keep_unsharded_storage``: the memory of a unit's unsharded parameters stays allocated.

A program captures a forward in a CUDA graph, which stores the addresses of the parameters::

    fully_shard(model)
    model.set_keep_unsharded_storage(True)
    model.unshard()
    address = model.weight.data_ptr()
    model.reshard()
    model.unshard()
    assert model.weight.data_ptr() == address

Without this case, the assertion fails, because a reshard frees the memory. The case gives each bucket an object in
place of its storage, which does not free the memory. Values are all-gathered as before. The method must be called again
after the model was converted to another dtype, because its buckets are new.

The case is a line of ``added_methods.py``.

*In torch:* an attribute of ``FSDPParam``, since version 2.15.

Spec: NEW-29.
"""

from typing import Any

from minifsdp.checks.arguments import SWITCH, require
from minifsdp.engine.bucket import Bucket
from minifsdp.engine.unit import State
from minifsdp.fsdp2.fsdp_state import states_for


class KeptStorage:
    """Takes the place of the storage of unsharded parameters. Allocates the memory and does not free it.

    Args:
        storage: the storage; also an attribute.
    """

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def resize_(self, num_bytes: int) -> None:
        """Allocates memory once; with 0, does nothing."""
        # PyTorch allocates other memory even for the same size.
        if num_bytes > self.storage.nbytes():
            self.storage.resize_(num_bytes)


class KeepsStorage:
    """The method of `FSDPModule`."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether the memory of the unsharded parameters stays allocated after a reshard (NEW-29).

        The addresses of the parameters then stay the same. The unit needs this memory also between its uses.

        Args:
            keep: whether it stays allocated.
            recurse: whether it applies to the units inside the module, too.
        """
        require(SWITCH, "set_keep_unsharded_storage", keep=keep)
        for state in states_for(self, recurse):
            unit: Any = state.unit
            for bucket in () if unit is None else unit.layout.buckets:
                if not isinstance(bucket, Bucket):
                    continue
                storage: Any = bucket._storage
                if isinstance(storage, KeptStorage):
                    storage = storage.storage
                kept: Any = KeptStorage(storage) if keep else storage
                bucket._storage = kept
                if not keep and unit.state is State.SHARDED:
                    bucket.free()
