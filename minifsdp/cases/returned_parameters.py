"""A module that returns one of its parameters, or a view of one.

The caller reads the returned tensor after the unit's forward. So the unit stays unsharded until its backward::

    class Embedding(nn.Module):
        def forward(self, tokens):
            return self.embedding(tokens), self.embedding.weight

    hidden, weight = model.embed(tokens)
    logits = model.decoder(hidden) @ weight.T          # reads the weight after the forward of the unit
    loss = cross_entropy(logits, targets)
    loss.backward()

Without this case, the product reads a weight whose memory was freed. The output of a unit is checked once, in its
first forward.

*In torch:* FSDP1 and FSDP2 raise an error about a storage that is too small.

Spec: PROG-32.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minifsdp.engine.messages import message, warn
from minifsdp.engine.precision import tensors_in
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit


class ReturnedParameters:
    """The units of one root whose modules return parameters.

    Args:
        root_state: the root.
    """

    def __init__(self, root_state: RootState) -> None:
        self._is_returned: dict[Unit, bool] = {}
        self._num_units = len(root_state.units)
        self._points = root_state.iteration.points
        self._points.unit_output.append(self.hold_returned)

    def hold_returned(self, unit: Unit, output: Any) -> Any:
        """Called after a forward of a unit: holds the unit if its module returns parameters."""
        if unit not in self._is_returned:
            self._is_returned[unit] = _shares_memory(output, unit.layout.leaves)
            if self._is_returned[unit] and unit.policy.reshard_after_forward:
                warn(message("returns-parameters", unit=unit.name))
            if len(self._is_returned) == self._num_units and not any(
                self._is_returned.values()
            ):
                # Later forwards do not need this function. The list is replaced, because the engine iterates over it.
                self._points.unit_output = [
                    one for one in self._points.unit_output if one != self.hold_returned
                ]
        unit.is_held |= self._is_returned[unit]
        return output


def _shares_memory(output: Any, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor in ``output`` uses the memory of one of ``leaves``. Tensor classes are not inspected."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    plain = torch.Tensor, torch.nn.Parameter
    memory = {
        leaf.untyped_storage().data_ptr()
        for leaf in leaves
        if type(leaf) in plain and leaf.numel()
    } - {0}
    strided = (t for t in tensors_in(output) if t.layout is torch.strided)
    return any(
        type(t) in plain and t.untyped_storage().data_ptr() in memory for t in strided
    )
