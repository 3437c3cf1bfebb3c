"""Gathering and freeing by hand, and forgetting an iteration: what three methods of a sharded module do.

``unshard`` of a module is what its forward would do first, without the forward. Worked example, two blocks: while
``block0`` computes, ``block1.unshard(async_op=True)`` issues the gather of the second; its forward finds it under way
and waits. Nothing of this is needed in a training step, where the schedule asks ahead by itself. Who wants to wait
earlier has the handle that was returned, and that is the state itself: what is there to wait for, it knows.

*In torch:* ``FSDPParamGroup.unshard``, ``wait_for_unshard`` and ``reshard``.

Spec: FS2-19, FS2-20, NEW-15.
"""

from minifsdp.engine.unit import State
from minifsdp.fsdp2.fsdp_state import FSDPState


class UnshardHandle:
    """The promise of ``unshard(async_op=True)`` (FS2-20)."""

    def wait(self) -> None:
        """Afterwards the module shows its full parameters. Harmless to call twice, or never."""


class HandledState(FSDPState, UnshardHandle):
    """What one call of ``fully_shard`` has made, with what is done to it by hand."""

    def drop_gradients(self) -> None:
        """Forgets gradients of this iteration that have not been reduced, or not over all replicas."""
        for unit in self.current_tree().units:
            unit.layout.take_gradient(with_unreduced=True)
            for plan in unit.plans:
                plan.partial = None

    def unshard(self) -> None:
        """Issues the gather of this state's unit; `wait` completes it."""
        if self.unit is not None:
            tree = self.current_tree()
            # As where an iteration begins: the user may have put other tensors in place of the shards, or changed them.
            self.unit.layout.notice_edits()
            tree.lanes.gather.follow()
            if self.unit.layout.is_stale():
                self.unit.reshard()
            self.unit.unshard()

    def wait(self) -> None:
        """Completes a gather, and shows the full parameters; those that were freed since stay so."""
        if self.unit is not None and self.unit.state is not State.SHARDED:
            self.unit.wait()
            self.unit.layout.show_unsharded()

    def reshard(self) -> None:
        """Frees the full parameters of this state's unit."""
        if self.unit is not None:
            self.unit.reshard()
