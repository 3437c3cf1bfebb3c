"""The wrapper and its options under the long name of torch: ``minifsdp.fully_sharded_data_parallel``.

The class, and what there is to read about it, is in ``fsdp1/wrapper.py``. The three constants in capitals are here
because checkpoint scripts use them to take wrapper prefixes out of names.
"""

from minifsdp import api
from minifsdp.api import *  # noqa: F403
from minifsdp.engine.flat_parameter import FLAT_NAME as FLAT_PARAM
from minifsdp.fsdp1.base import PREFIX as FSDP_PREFIX
from minifsdp.fsdp1.base import WRAPPED as FSDP_WRAPPED_MODULE
from minifsdp.fsdp1.flat_param import FlatParameter
from minifsdp.fsdp1.policies import CustomPolicy, ModuleWrapPolicy
from minifsdp.fsdp1.state_dict_options import OptimStateKeyType
from minifsdp.fsdp1.wrapper import FullyShardedDataParallel

__all__ = [
    "CustomPolicy",
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
]
__all__ += api.__all__
