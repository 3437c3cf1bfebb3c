"""minifsdp: an implementation of FSDP that you can read in a weekend, check line by line, and run.

    from minifsdp import FullyShardedDataParallel as FSDP

Names, arguments and results are those of ``torch.distributed.fsdp``. To read the package, start with the docstring of
``engine/layout.py`` and continue in the order that ``engine/__init__.py`` lists.
"""

from typing import Any as _Any

from torch import nn as _nn
from torch.distributed.fsdp import FlatParameter

# Available as attributes after `import minifsdp`, like the modules of the same names in torch.
from minifsdp import api as api
from minifsdp import fully_sharded_data_parallel as fully_sharded_data_parallel
from minifsdp import sharded_grad_scaler as sharded_grad_scaler
from minifsdp import wrap as wrap
from minifsdp.api import *  # noqa: F403
from minifsdp.batches import token_scale, token_weighted, while_all_have_data
from minifsdp.cases.manual_finalization import GradientReductionHandle
from minifsdp.checkpoint import loading as _loading
from minifsdp.checkpoint.state_dict_options import OptimStateKeyType
from minifsdp.compat import state_dict_functions as _state_dict_functions
from minifsdp.compat.bfloat16 import bf16_supported
from minifsdp.compat.state_dict_functions import *  # noqa: F403
from minifsdp.debugging import switch as _debugging
from minifsdp.debugging.switch import debug
from minifsdp.engine.events import events as _events
from minifsdp.fsdp1.grad_scaler import ShardedGradScaler
from minifsdp.fsdp2.fully_shard import fully_shard
from minifsdp.fsdp2.functions import register_fsdp_forward_method, share_comm_ctx
from minifsdp.fsdp2.mesh_dims import DataParallelMeshDims
from minifsdp.fsdp2.module import FSDPModule, UnshardHandle
from minifsdp.fsdp2.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from minifsdp.fsdp2.replicate import ReplicateModule, replicate
from minifsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from minifsdp.reduction_overlap import set_reduction_overlap
from minifsdp_gloo import transport_between as _transport_between


def explain(model: _nn.Module, **options: _Any) -> _Any:
    """Describes the units of a model, the shards of each rank, and the memory and traffic of a step.

    Returns the result of `minifsdp_tools.explain.explain`, which has the same arguments. The package of the tools is
    imported here, because training does not need it.
    """
    from minifsdp_tools.explain import explain

    return explain(model, **options)


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateKeyType",
    "ReplicateModule",
    "ShardedGradScaler",
    "UnshardHandle",
    "bf16_supported",
    "debug",
    "explain",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "set_reduction_overlap",
    "share_comm_ctx",
    "token_scale",
    "token_weighted",
    "while_all_have_data",
]
__all__ += api.__all__
__all__ += _state_dict_functions.__all__
__version__ = "0.1.0"

_events.states.append(_loading.register_hooks)
# Between CPUs, shards are sent as messages. Without this line, gloo's own collectives send them.
_events.transport = _transport_between
_debugging.from_environment()
