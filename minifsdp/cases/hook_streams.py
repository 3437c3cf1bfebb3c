"""A function of the program that gets reduced gradients on a stream of its own.

The function computes a norm of each gradient, and the reductions of the next units do not wait for it::

    fully_shard(model)
    stream = torch.cuda.Stream()
    model.set_all_reduce_hook(lambda reduced: norms.append(reduced.norm()), stream=stream)
    loss(model(batch)).backward()

Without this case, the function runs on the communication stream of the reduction. Its work delays later reductions.

*In torch:* ``FSDPParamGroup`` has an attribute for the stream of the hook.

Spec: NEW-09.
"""

from collections.abc import Callable
from typing import Any

import torch

from minifsdp.engine.comm_streams import current_stream


def on_stream(
    hook: Callable[[torch.Tensor], None], stream: Any
) -> Callable[[torch.Tensor], None]:
    """A function that calls ``hook`` on ``stream``, after the reduction, and before the layout accepts its result."""

    def call(local_shard: torch.Tensor) -> None:
        here = current_stream(local_shard.device)
        stream.wait_stream(here)
        try:
            with torch.get_device_module(local_shard.device).stream(stream):
                hook(local_shard)
        finally:
            # Wait also after an exception, because `local_shard` is released next.
            here.wait_stream(stream)

    return call
