"""After a forward between backward and the optimizer step, the next forward uses the old weights.

torch keeps the root unsharded after a forward, because the backward needs it next. If no backward follows, the root
stays unsharded. The optimizer then updates the shards, but the next forward does not all-gather them again. This also
happens after an evaluation, for example of a loss before the step. Both APIs are affected; the wrapper with
``SHARD_GRAD_OP`` does the same in all units. The weights here are 1, and the step sets them to 0.

With torch 2.13.0::

    FSDP: 4.0 after a forward, 4.0 after an evaluation
    fully_shard: 4.0 after a forward, 4.0 after an evaluation

With minifsdp::

    FSDP: 0.0 after a forward, 0.0 after an evaluation
    fully_shard: 0.0 after a forward, 0.0 after an evaluation

Spec: FRESH-04.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard


def main() -> str:
    lines = []
    for name, shard in (("FSDP", wrapped), ("fully_shard", fully_shard)):
        forward, evaluation = (output(shard, enabled) for enabled in (True, False))
        lines.append(f"{name}: {forward} after a forward, {evaluation} after an evaluation")
    return "\n".join(lines)


def wrapped(module: nn.Module) -> nn.Module:
    return FSDP(module, device_id=torch.device("cpu"))


def output(shard: Callable, enabled: bool) -> float:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = shard(layer)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    with torch.set_grad_enabled(enabled):
        model(torch.ones(1, 4))
    sgd.step()
    return model(torch.ones(1, 4)).item()
