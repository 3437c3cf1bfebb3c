"""What a model that is compiled and wrapped must look out for. That the compiler steps over wrappers is told elsewhere.

A compiled block looks up its parameters by name each time it runs. With DTensors, or ``use_orig_params=True``, it finds
a view there, as if nothing were sharded. With a flat parameter it finds a plain tensor where it saw a stand-in before,
compiles again and again, and gives up; so that is worth a warning.

``torch.compile(block)`` makes a new module that goes past its own child: it calls the block's code directly. A wrapper
that a policy puts around the block would never be called, so that is refused; ``block.compile()`` has no such effect.

Worked example: ``torch.compile(FullyShardedDataParallel(model))`` with a flat parameter warns once, at the first
forward.

*In torch:* no warning; ``FullyShardedDataParallel`` without original parameters is said to be unsupported.

Spec: ORIG-07.
"""

import sys

from torch import nn

from minifsdp.engine.messages import message, warn


def warn_if_compiled(hides_originals: bool) -> None:
    """Called at the first forward: says what a compiled model needs, if this one does not have it."""
    if not hides_originals or "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if callable(get_eval_frame_callback()):
        warn(message("compiled-flat"))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` has made of another module."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)
