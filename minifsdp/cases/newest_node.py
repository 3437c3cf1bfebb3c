"""A unit whose module has recorded a newer operation than its output.

Autograd runs the newest node first. If a module records an operation after its output, and the loss contains it, the
backward of this operation would run before the pre-backward hook of the output. It would read freed parameters. So the
output of such a unit passes through one more node, which is then the newest one::

    penalties = []

    class Layer(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            penalties.append(self.weight.square().sum())        # newer than the output
            return output

    loss = model(x).sum() + sum(penalties)
    loss.backward()

Without this case, the backward of ``square`` reads a weight whose memory was freed.

*In torch:* the same program ends with a segmentation fault on the CPU, with FSDP1 and FSDP2.

Spec: PROG-29.
"""

from collections.abc import Callable
from typing import Any

import torch

from minifsdp.cases.output_nodes import through_nodes, with_node
from minifsdp.engine.precision import tensors_in
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit

# The number that autograd gives to the next node of this thread.
next_number: Callable[[], int] = torch.autograd._get_sequence_nr


class NewestNode:
    """Adds a node to the output of a unit whose newest node is another one.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        root_state.iteration.points.unit_output.append(self.extend_output)

    def extend_output(self, unit: Unit, output: Any) -> Any:
        """Called after a forward of a unit; returns the output to pass to the caller."""
        if not unit.policy.reshard_after_forward:
            return output
        for tensor in (
            [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        ):
            if (
                tensor.grad_fn is not None
                and tensor.grad_fn._sequence_nr() == next_number() - 1
            ):
                return output
        if not torch.is_grad_enabled():
            return output
        return through_nodes(
            lambda tensor, _: with_node(tensor), output, skips_used=False
        )
