"""Models and modules that are compiled with ``torch.compile``.

``engine/compiler.py`` makes the compiler skip wrappers, so a compiled model trains. Two programs need more::

    model = nn.Sequential(torch.compile(Block()), Block())
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))     # an error

    model = FSDP(nn.Sequential(Block(), Block()))
    for x in batches:
        torch.compile(model)(x).sum().backward()                # a warning

``torch.compile(block)`` returns a new module that calls the code of ``block`` directly. If a policy wrapped ``block``,
this wrapper would never be called, and the block would compute with its shards. So this case is an error.
``block.compile()`` does not have this problem.

A compiled block looks up its parameters by name at each run. With DTensors, or with ``use_orig_params=True``, it finds
a view, as in an unsharded model. With a flat parameter, it finds a plain tensor instead of the placeholder parameter
from compile time. The compiler then recompiles until it reaches its limit, so this case causes a warning, once for a
model.

*In torch:* neither. The documentation says that ``torch.compile`` needs ``use_orig_params=True``.

Spec: ORIG-07.
"""

from collections.abc import Container

from torch import nn

from minifsdp.engine.messages import message, warn


def refuse_compiled(root_module: nn.Module, chosen: Container[nn.Module]) -> None:
    """Checks that no chosen module is inside a compiled module, where its wrapper would never be called.

    Raises:
        ValueError: if a chosen module was passed to ``torch.compile``. The message has its name.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    for path, module in root_module.named_modules():
        inside = next((child for child in module.children() if child in chosen), None)
        if inside is not None and isinstance(module, OptimizedModule):
            raise ValueError(
                message("compiled-before", type=type(inside).__name__, path=path)
            )


def warn_if_compiled(use_orig_params: bool) -> None:
    """Called at the first forward. Warns if the model is compiled and uses flat parameters."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if not use_orig_params and callable(get_eval_frame_callback()):
        warn(message("compiled-flat"))
