"""``FSDP.state_dict_type`` with a ``fully_shard`` model fails on exit.

The settings only apply to ``FullyShardedDataParallel`` and have no effect on such a model. On exit, torch looks for the
previous settings, which it has not stored.

With torch 2.13.0::

    KeyError: None

With minifsdp::

    left, with a DTensor

Spec: FS2-SD-13.
"""

from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = fully_shard(nn.Linear(4, 2))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        state = model.state_dict()
    return f"left, with a {type(state['weight']).__name__}"
