"""Checks for ``torch.compile`` with flat parameters. ``engine/compiler.py`` makes the compiler skip wrappers.

A compiled block looks up its parameters by name at each run. With DTensors, or with ``use_orig_params=True``, it finds
a view, as in an unsharded model. With a flat parameter, it finds a plain tensor instead of the placeholder parameter
from compile time. The compiler then recompiles repeatedly until it reaches its limit, so this case causes a warning.

``torch.compile(block)`` returns a new module that calls the code of ``block`` directly. If a policy wrapped ``block``,
this wrapper would never be called, so this case is an error. ``block.compile()`` does not have this problem.

Worked example: ``torch.compile(FullyShardedDataParallel(model))`` with a flat parameter warns once, at the first
forward.

*In torch:* no warning. The documentation says that ``torch.compile`` needs ``use_orig_params=True``.

Spec: ORIG-07.
"""

from minifsdp.engine.messages import message, warn


def warn_if_compiled(use_orig_params: bool) -> None:
    """Called at the first forward. Warns if the model is compiled and uses flat parameters."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if not use_orig_params and callable(get_eval_frame_callback()):
        warn(message("compiled-flat"))
