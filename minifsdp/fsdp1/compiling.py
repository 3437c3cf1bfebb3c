"""Getting along with ``torch.compile``.

The compiler leaves the code of the wrapper alone, see ``engine/compiler.py``, and compiles the modules inside it, one
unit at a time. For a model of many equal blocks that is no loss; a block is compiled once and used many times.

A compiled block looks up its parameters by name each time it runs. With ``use_orig_params=True`` it finds a view under
the name of a parameter, as if nothing were sharded. With a flat parameter it finds a plain tensor where it saw a
stand-in before, compiles again and again, and gives up; so that is worth a warning.

``torch.compile(block)`` makes a new module that goes past its own child: it calls the block's code directly. A wrapper
that a policy puts around the block would never be called, so that is refused; ``block.compile()`` has no such effect.

*In torch:* ``torch/distributed/fsdp`` is on the compiler's own list of code to step over.

Spec: ORIG-07.
"""

from __future__ import annotations

import sys
import warnings

from torch import nn

from minifsdp.engine.messages import message


def warn_if_compiled(hides_originals: bool) -> None:
    """Called at the first forward: says what a compiled model needs, if this one does not have it."""
    if not hides_originals or "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if callable(get_eval_frame_callback()):
        warnings.warn(message("compiled-flat"), stacklevel=2)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` has made of another module."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)
