"""Manual ``unshard`` and ``reshard``, and discarding an iteration: the code behind three methods of a sharded module.

``unshard`` issues the all-gather that the module's forward issues first. Worked example, two blocks: while ``block0``
computes, ``block1.unshard(async_op=True)`` issues the all-gather of the second. The forward of ``block1`` then only
waits for it. A training step does not need these calls, because the schedule prefetches automatically.
``unshard(async_op=True)`` returns a handle; call its ``wait()`` to wait earlier. The handle is the state itself.

*In torch:* ``FSDPParamGroup.unshard``, ``wait_for_unshard`` and ``reshard``.

Spec: FS2-19, FS2-20, NEW-15.
"""

from minifsdp.engine.unit import State
from minifsdp.fsdp2.fsdp_state import FSDPState


class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns (FS2-20)."""

    def wait(self) -> None:
        """Waits for the all-gather and registers the unsharded parameters. Calling it twice, or never, is safe."""


class HandledState(FSDPState, UnshardHandle):
    """The state of one ``fully_shard`` call, with the operations that users call manually."""

    def drop_gradients(self) -> None:
        """Discards gradients of this iteration that are not reduced yet, or not all-reduced over the replicas."""
        for unit in self.current_tree().units:
            unit.layout.take_gradient(with_unreduced=True)
            for plan in unit.plans:
                plan.partial = None

    def unshard(self) -> None:
        """Issues the all-gather of this state's unit; `wait` completes it."""
        if self.unit is not None:
            tree = self.current_tree()
            # As at the start of an iteration: the user may have replaced or modified the sharded parameters.
            self.unit.layout.accept_replacements()
            tree.comm_streams.all_gather.wait_compute()
            if self.unit.layout.is_stale():
                self.unit.reshard()
            self.unit.unshard()

    def wait(self) -> None:
        """Completes the all-gather and registers the unsharded parameters. Does nothing after a reshard."""
        if self.unit is not None and self.unit.state is not State.SHARDED:
            self.unit.wait()
            self.unit.layout.use_unsharded_params()

    def reshard(self) -> None:
        """Reshards this state's unit, which frees the unsharded parameters."""
        if self.unit is not None:
            self.unit.reshard()
