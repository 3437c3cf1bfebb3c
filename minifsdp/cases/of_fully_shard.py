"""The cases of ``fully_shard``: one list for each of its extension points, one line for each case.

``fully_shard`` calls more cases by name, for example ``optimizer_steps.py``, ``smaller_mesh.py`` and
``torch_registry.py``.

Worked example: ``fully_shard`` creates an object of each class in `BUCKETS`, and passes them to the engine as
`Options.cases`. Before the engine stores a parameter in an ordinary bucket, it asks each of these objects whether it
takes this parameter.

*In torch:* the rare cases are branches in ``FSDPState``, ``FSDPParamGroup`` and ``FSDPParam``.
"""

from minifsdp.cases.module_lists import StateOfList
from minifsdp.cases.own_meshes import own_mesh
from minifsdp.cases.parameter_dtypes import ParameterDtypes
from minifsdp.cases.tensor_extensions import TensorExtensions

# Classes that store parameters in buckets of their own, see note 6 of ``engine/bucket.py``. Their argument is the
# mixed-precision policy.
BUCKETS = [
    TensorExtensions,
    ParameterDtypes,
]
# Classes of states. The first one that takes the modules replaces `FSDPState`, see ``fsdp2/fsdp_state.py``.
STATES = [
    StateOfList,
]
# Functions that replace a result of ``shard_placement_fn``. They are called with the result for one parameter, the mesh
# and the path of the parameter, and return a placement and a mesh.
PLACEMENTS = [
    own_mesh,
]
