"""``FullyShardedDataParallel``: the wrapper, with everything attached that is not needed for a training step.

The wrapper itself, its constructor and its forward, is in ``fsdp1/wrapper.py``. It knows nothing of what is added here:

=========================================  ===========================================================
``fsdp1/names.py``                         it is looked through: names, attributes, items
``fsdp1/training_methods.py``              ``no_sync``, ``summon_full_params``, ``clip_grad_norm_``, hooks
``checkpoint/state_dict_methods.py``       the model's state, in three forms
``checkpoint/optim_state_methods.py``      the optimizer's state
``compat/optim_state_legacy.py``           the same, as it was written up to torch 2.0
``compat/wrapper_names.py``                private names that frameworks read
``compat/legacy.py``                       keywords of torch 1.11
=========================================  ===========================================================

Worked example: ``FullyShardedDataParallel(model).no_sync()`` is a method of ``TrainingMethods``, which sets a switch on
each unit; the wrapper's forward reads it nowhere, the engine does.

The three constants in capitals are here because checkpoint scripts use them to take wrapper prefixes out of names.

*In torch:* one class of 2167 lines, importable from the same place.

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
from minifsdp.engine.flat_parameter import FLAT_NAME as FLAT_PARAM
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
        process_group: who shards; for a hybrid strategy the pair (sharding group, replication group).
        sharding_strategy: what is sharded, see `ShardingStrategy`; ``None`` means ``FULL_SHARD``.
        cpu_offload: whether shards live on the CPU.
        auto_wrap_policy: which submodules become units of their own.
        backward_prefetch: when backward asks for the next unit; ``None`` means never ahead of time.
        mixed_precision: which dtype at which step.
        ignored_modules: modules whose parameters are left alone.
        param_init_fn: gives values to modules on the meta device.
        device_id: where to compute.
        sync_module_states: whether rank 0's initial values are sent to the others.
        forward_prefetch: whether forward asks for the next unit, in the order of the first iteration.
        limit_all_gathers: whether the CPU waits before a third unit is in flight.
        use_orig_params: whether the original parameters stay visible.
        ignored_states: parameters or modules to be left alone.
        device_mesh: who shards, as a mesh of one axis, or of two for a hybrid strategy.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: arguments contradict each other.
        RuntimeError: there is no process group.
    """

    @functools.wraps(Wrapper.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **in_todays_spelling(kwargs))
        step_over_this_package()


# Whatever class the user has made of this one: what a policy wraps is given these arguments and no others.
Wrapper._inner_class = FullyShardedDataParallel
# The arguments that ``help`` shows, and the name in Python's own "got an unexpected keyword argument".
own, module, *_ = inspect.signature(Wrapper.__init__).parameters.values()
fields = inspect.signature(Options).parameters.values()
Wrapper.__init__.__signature__ = inspect.Signature([own, module, *fields])  # type: ignore[attr-defined]
for constructor in (Options.__init__, Wrapper.__init__, FullyShardedDataParallel.__init__):
    constructor.__qualname__ = "FullyShardedDataParallel.__init__"
