"""A gradient of a parameter that has a graph (``create_graph=True``): an error.

The reduction of gradients is outside of autograd. So the reduced gradient cannot have a graph, and a penalty on the
gradients would have no effect on the parameters::

    loss = model(x).square().mean()
    loss.backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
    penalty.backward()

Without this case, the first backward raises no error, and the second one has no graph.

Graphs of the gradients of *inputs* are supported, see note 6 of ``engine/hooks.py``.

*In torch:* FSDP1 and FSDP2 have no such check.

Spec: PROG-25.
"""

from minifsdp.engine.layout import Gradient
from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit


class GraphOfGradients:
    """Refuses gradients of parameters that have a graph.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        root_state.iteration.points.held_gradient.append(self._check)

    def _check(self, unit: Unit, gradient: Gradient) -> None:
        if any(part.requires_grad for part in gradient.parts):
            raise RuntimeError(message("graph-of-gradients", unit=unit.name))
