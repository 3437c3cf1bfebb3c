"""Other functions that parallelise a module in place, and how they and ``fully_shard`` know of each other.

PyTorch has several functions that change a module without wrapping it; ``replicate`` is the one that meets
``fully_shard``: one layer copied on every rank, the rest sharded. Each leaves its name in a registry on the module, and
each looks there before it takes parameters::

    replicate(model.embed)      # the registry of `embed` says "replicate"
    fully_shard(model)          # takes all parameters but those of `embed`, and says "fully_shard"
    replicate(model)            # reads that, and refuses

Beside the name there is what the function keeps for the module. Libraries ask PyTorch for it before they shard; what
they read of it is in ``framework_names.py``.

*In torch:* the decorator ``contract``, which also keeps the state of each function.

Spec: FS2-09, FS2-11, FS2-29.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._composable_state import _insert_module_state, _State


def register(modules: list[nn.Module], state: _State) -> None:
    """Leaves the name of ``fully_shard`` on each module, and ``state`` where libraries look for it."""
    item = RegistryItem()
    for module in modules:
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = item
        _insert_module_state(module, state)


def is_replicated(module: nn.Module) -> bool:
    """Whether ``replicate`` has taken ``module``, with all that is inside of it."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())
