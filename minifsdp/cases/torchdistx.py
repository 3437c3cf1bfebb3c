"""Modules that torchdistX has created without memory.

torchdistX runs the constructor of a model, records it instead of computing, and computes it later, one module at a
time. Its tensors are not on the meta device, so only its API detects them::

    from torchdistx.deferred_init import deferred_init

    model = deferred_init(Llama, config)            # no memory
    model = FSDP(model, auto_wrap_policy=policy)    # computes and shards one unit after the other

Without this case, the constructor of the wrapper reads tensors that have no values. `minifsdp.fsdp1.initial` calls
`without_memory` if a unit has no tensor on the meta device, and `materialize` for each module that it returns.

*In torch:* the same calls in ``_init_utils.py``.

Spec: META-09.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

Modules = Sequence[tuple[str, nn.Module]]


def without_memory(
    modules: Modules, tensors_of: Callable[[nn.Module], Iterable[torch.Tensor]]
) -> Modules:
    """The modules, with their paths, that own a tensor of torchdistX. None if it is not installed.

    Args:
        modules: the modules of a unit with their paths.
        tensors_of: returns the tensors that a module owns.
    """
    try:
        fake: Any = importlib.import_module("torchdistx.fake")
    except ImportError:
        return []
    return [
        (path, module)
        for path, module in modules
        if any(map(fake.is_fake, tensors_of(module)))
    ]


def materialize(module: nn.Module) -> None:
    """Computes the values of a module."""
    importlib.import_module("torchdistx.deferred_init").materialize_module(module)
