"""The list of the cases that use the extension points of a root.

The front ends pass it to the root state, see ``engine/extension_points.py``.

A case that is deleted here and as a file leaves a training step without it. Worked example: without `InnerBackward`, a
backward inside a forward frees parameters that the forward still needs.

*In torch:* no such list.

Spec: PROG-20 to PROG-29, PROG-32.
"""

from minifsdp.cases.changed_parameters import ChangedParameters
from minifsdp.cases.graph_of_gradients import GraphOfGradients
from minifsdp.cases.inner_backward import InnerBackward
from minifsdp.cases.newest_node import NewestNode
from minifsdp.cases.partial_sums import PartialSums
from minifsdp.cases.requested_parameters import RequestedParameters
from minifsdp.cases.returned_parameters import ReturnedParameters
from minifsdp.cases.side_outputs import SideOutputs
from minifsdp.cases.written_weights import WrittenWeights
from minifsdp.engine.extension_points import Case

CASES: tuple[Case, ...] = (
    # The functions at one point run in this order.
    PartialSums,
    WrittenWeights,
    InnerBackward,
    ChangedParameters,
    NewestNode,
    ReturnedParameters,
    GraphOfGradients,
    RequestedParameters,
    SideOutputs,
)
