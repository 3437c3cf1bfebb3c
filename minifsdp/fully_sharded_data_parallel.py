"""``FullyShardedDataParallel``: the wrapper, combined with the features that a training step does not need.

``fsdp1/wrapper.py`` contains the wrapper itself, its constructor and its forward. These files add methods to it:

=========================================  ===========================================================
``fsdp1/names.py``                         names, attributes and items of the wrapped module
``fsdp1/training_methods.py``              ``no_sync``, ``summon_full_params``, ``clip_grad_norm_``, hooks
``checkpoint/state_dict_methods.py``       the model's state dict, in three types
``checkpoint/optim_state_methods.py``      the optimizer's state dict
``compat/optim_state_legacy.py``           the same with the API up to torch 2.0
``compat/wrapper_names.py``                private names that frameworks read
``compat/legacy.py``                       keywords of torch 1.11
=========================================  ===========================================================

Worked example: ``FullyShardedDataParallel(model).no_sync()`` is a method of ``TrainingMethods``. It sets an option on
each unit, which the engine reads; the wrapper's forward does not use it.

Checkpoint scripts use the three constants in capitals to remove wrapper prefixes from names.

*In torch:* one class of 2167 lines, at the same import path.

Spec: CTOR-01, LEGACY-01.
"""

import functools
import inspect
from typing import Any

from minifsdp import api
from minifsdp.api import *  # noqa: F403
from minifsdp.checkpoint.optim_state_methods import OptimStateMethods
from minifsdp.checkpoint.state_dict_options import OptimStateKeyType
from minifsdp.compat.flat_param import FlatParameter
from minifsdp.compat.legacy import in_todays_spelling
from minifsdp.compat.optim_state_legacy import OldOptimStateMethods
from minifsdp.compat.wrapper_names import FrameworkNames
from minifsdp.engine.compiler import step_over_this_package
from minifsdp.engine.flat_params import FLAT_NAME as FLAT_PARAM
from minifsdp.fsdp1.names import NameMethods
from minifsdp.fsdp1.options import Options
from minifsdp.fsdp1.policies import CustomPolicy, ModuleWrapPolicy
from minifsdp.fsdp1.training_methods import TrainingMethods
from minifsdp.fsdp1.wrapper import PREFIX as FSDP_PREFIX
from minifsdp.fsdp1.wrapper import WRAPPED as FSDP_WRAPPED_MODULE
from minifsdp.fsdp1.wrapper import Wrapper

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


class FullyShardedDataParallel(  # type: ignore[misc]
    NameMethods, OldOptimStateMethods, OptimStateMethods, FrameworkNames, TrainingMethods, Wrapper
):
    """Shards a module's parameters, gradients and optimizer state over the ranks of a group.

    Every rank of the group must construct it, with modules of the same structure and in the same order.

    Args:
        module: the module to wrap.
        process_group: the group to shard over; for a hybrid strategy the pair (shard group, replicate group).
        sharding_strategy: what is sharded, see `ShardingStrategy`; ``None`` means ``FULL_SHARD``.
        cpu_offload: whether shards are stored on the CPU.
        auto_wrap_policy: which submodules become separate units.
        backward_prefetch: when backward prefetches the next unit; ``None`` means no prefetch.
        mixed_precision: the dtypes for mixed precision.
        ignored_modules: modules whose parameters are not sharded.
        param_init_fn: initializes modules on the meta device.
        device_id: the compute device.
        sync_module_states: whether rank 0 broadcasts its initial values.
        forward_prefetch: whether forward prefetches the next unit, in the order of the first iteration.
        limit_all_gathers: whether the CPU waits before it all-gathers a third unit while two are in flight.
        use_orig_params: whether the modules keep the original parameters instead of a flat parameter.
        ignored_states: parameters or modules to ignore.
        device_mesh: the ranks to shard over as a mesh with one dimension, or two for a hybrid strategy.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if arguments contradict each other.
        RuntimeError: if there is no process group.
    """

    @functools.wraps(Wrapper.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **in_todays_spelling(kwargs))
        step_over_this_package()


# A policy always wraps with this class, because a user's subclass may have other constructor arguments.
Wrapper._inner_class = FullyShardedDataParallel
# Set the signature that ``help`` shows, and the name in Python's "got an unexpected keyword argument" error.
own, module, *_ = inspect.signature(Wrapper.__init__).parameters.values()
fields = inspect.signature(Options).parameters.values()
Wrapper.__init__.__signature__ = inspect.Signature([own, module, *fields])  # type: ignore[attr-defined]
for constructor in (Options.__init__, Wrapper.__init__, FullyShardedDataParallel.__init__):
    constructor.__qualname__ = "FullyShardedDataParallel.__init__"
