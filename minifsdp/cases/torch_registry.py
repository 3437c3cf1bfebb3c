"""The registry through which PyTorch and libraries detect a module on which ``fully_shard`` was called.

PyTorch has several functions that change a module without wrapping it. ``replicate`` can be combined with
``fully_shard``: one layer is replicated on every rank, the rest is sharded. Each function adds its name to a registry
on the module, and reads this registry before it takes parameters::

    replicate(model.embed)      # adds "replicate" to the registry of `embed`
    fully_shard(model)          # takes all parameters except those of `embed`, and adds "fully_shard"
    replicate(model)            # finds "fully_shard" and raises an error

Each function also stores a state for the module. Libraries read some attributes of this state, see
``minifsdp/cases/torch_attributes.py``.

*In torch:* the decorator ``contract``.

Spec: FS2-09, FS2-11, FS2-29.
"""

from collections import OrderedDict
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _insert_module_state

from minifsdp.engine.compiler import step_over_this_package


def register(state: Any, modules: list[nn.Module], call: str) -> None:
    """Stores the state of ``modules`` where PyTorch and libraries look for it. ``call`` is the name of the function."""
    step_over_this_package()
    for module in modules:
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[call] = None
        _insert_module_state(module, state)
        # `torch.distributed.fsdp.fully_shard.state(module)` returns the state.
        # A program may have replaced torch's function, which has this attribute.
        original = getattr(torch_fsdp.fully_shard, "__wrapped__", None)
        module.__dict__.setdefault(STATE_KEY, {})[original] = state
