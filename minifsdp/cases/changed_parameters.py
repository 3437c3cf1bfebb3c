"""Parameters that change between a forward and its backward.

A backward needs the values of the forward. The engine has freed the unsharded parameters, and gathers them again from
the shards. If a step or the program has changed the shards since, the gradients would be wrong, without an error::

    loss = model(x).sum()
    optimizer.step()                 # changes the shards
    loss.backward()                  # gathers the new values

So a backward compares the versions of the parameters and the number of optimizer steps with those at the end of the
recorded forward, and raises an error. This does not depend on the tensors that autograd has saved. A first layer only
needs its input in backward. To find this out, the engine would have to search the graph of the unit.

Without this case, the last line computes gradients at the new values, and raises no error.

After ``summon_full_params`` with ``writeback``, the backward uses the new values.

*In torch:* FSDP2, and FSDP1 with ``use_orig_params``, raise no error. Without FSDP, autograd raises one.

Spec: PROG-26.
"""

from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState
from minifsdp.engine.sharded_param import VERSION
from minifsdp.engine.unit import Unit

Versions = tuple[int, list[int]]


class ChangedParameters:
    """The versions of the parameters of one root.

    Args:
        root_state: the root.
    """

    def __init__(self, root_state: RootState) -> None:
        self._iteration = root_state.iteration
        self._units = root_state.units
        self._parameters = [
            p for unit in self._units for p in unit.layout.local_parameters
        ]
        # The versions after the last recorded forward; ``None`` while such a forward runs.
        self._versions: Versions | None = None
        self._written: set[Unit] = set()
        self._changed: set[Unit] = set()
        points = root_state.iteration.points
        self._checks = points.unit_backward
        points.forward_begins.append(self._forget_versions)
        points.forward_ends.append(self._note_versions)
        points.values_written.append(self._written.add)
        points.backward_begins.append(self._compare)

    def _forget_versions(self) -> None:
        if self._iteration.is_recorded:
            self._versions = None
            self._written.clear()

    def _note_versions(self, output: object) -> object:
        if not self._iteration.is_recorded:
            return output
        self._versions = self._current_versions()
        self._written.clear()
        return output

    def _current_versions(self) -> Versions:
        # The version of a parameter does not show every step, see ``optimizer_steps.py``.
        num_steps = self._units[0].layout.steps.count if self._units else 0
        return num_steps, list(map(VERSION, self._parameters))

    def _compare(self) -> None:
        """Called at the beginning of a backward: finds the units that have changed since the forward."""
        if self._check in self._checks:
            self._checks.remove(self._check)
        # A backward inside a forward does not belong to the last recorded forward.
        if self._iteration.in_forward or self._versions is None:
            return
        num_steps, versions = self._versions
        if self._current_versions() == self._versions:
            return
        edited = {
            p
            for p, version in zip(self._parameters, versions, strict=True)
            if p._version != version
        }
        changed = {
            unit
            for unit in self._units
            if not edited.isdisjoint(unit.layout.local_parameters)
        }
        stepped = {unit for unit in self._units if unit.layout.stepped_at > num_steps}
        self._changed = changed - self._written | stepped
        # A backward without changes calls no function for each unit.
        self._checks.append(self._check)

    def _check(self, unit: Unit) -> None:
        if unit in self._changed:
            raise RuntimeError(message("changed-since-forward", unit=unit.name))
