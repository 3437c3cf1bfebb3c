"""A backward inside a forward, for example a model that computes forces from an energy.

::

    class Forces(nn.Module):
        def forward(self, positions):
            with torch.enable_grad():
                positions.requires_grad_()
                energy = self.energy(positions).sum()
                (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
            return self.correction(forces)

The end of such a backward does not end an iteration: the modules still compute, and the next backward needs the
parameters. So it reshards nothing. The end of the forward completes the reductions, because no other backward may
follow, for example if each block of a model computes its own loss.

Without this case, the second backward reads parameters whose memory was freed.

*In torch:* FSDP1 runs this program. FSDP2 raises an error about a storage that is too small.

Spec: PROG-23.
"""

from typing import Any

from minifsdp.engine.root import RootState


class InnerBackward:
    """Ends a backward inside a forward together with the forward.

    Args:
        root_state: the root.
    """

    def __init__(self, root_state: RootState) -> None:
        self._iteration = root_state.iteration
        self._is_open = False
        root_state.iteration.points.backward_ends.append(self._is_inside_forward)
        root_state.iteration.points.forward_ends.append(self._end)

    def _is_inside_forward(self) -> bool:
        self._is_open = self._iteration.in_forward
        return self._is_open

    def _end(self, output: Any) -> Any:
        """Called at the end of a forward: ends the backwards inside it."""
        if self._is_open:
            self._is_open = False
            self._iteration.in_backward = True
            for unit in reversed(self._iteration.units):
                # A unit that still computed then has kept its gradient.
                has_gradient = any(leaf.grad is not None for leaf in unit.layout.leaves)
                if has_gradient and not unit.uses.awaits_backward:
                    self._iteration.post_backward(unit)
            if self._iteration.is_last_backward:
                self._iteration.reducer.finish()
            self._iteration.leave_backward()
        return output
