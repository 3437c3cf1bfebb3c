"""The state of a process that a library could change for the whole program: hooks, handlers, threads and functions."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

__all__ = ["changes", "state_of_process"]

# Modules and classes of torch whose functions could be replaced.
_PLACES: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.autograd,
    torch.autograd.graph,
    torch.nn.functional,
    nn.Module,
    nn.Parameter,
    nn.Linear,
    torch.optim.Optimizer,
    torch.utils.checkpoint,
    torch_module,
    torch_optimizer,
    dist,
    dist.distributed_c10d,
)


# Functions that were passed to `atexit.register`, and not to `atexit.unregister`, since this module was imported.
exit_handlers: list[Any] = []


def _watch_exit_handlers() -> None:
    """Records the exit handlers of Python. Python only has a count of them, which never decreases."""
    register, unregister = atexit.register, atexit.unregister

    def register_and_note(function: Any, *args: Any, **kwargs: Any) -> Any:
        exit_handlers.append(function)
        return register(function, *args, **kwargs)

    def unregister_and_note(function: Any) -> None:
        exit_handlers[:] = [other for other in exit_handlers if other != function]
        unregister(function)

    atexit.register, atexit.unregister = register_and_note, unregister_and_note  # type: ignore[assignment]


_watch_exit_handlers()


def state_of_process() -> dict[str, Any]:
    """Everything that is compared, by name."""
    gc.collect()
    wake_up = signal.set_wakeup_fd(-1)
    if wake_up != -1:
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    state: dict[str, Any] = {
        # torch.distributed replaces it with each default group.
        "sys.excepthook": sys.excepthook.__qualname__,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "trace functions": (sys.gettrace(), sys.getprofile()),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wake-up descriptor": wake_up,
        "exit handlers": list(exit_handlers),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        # Other programs use the folder for temporary files as well.
        "files": [name for name in os.listdir(tempfile.gettempdir()) if "minifsdp" in name],
        "hooks of the import system": (list(sys.meta_path), list(sys.path_hooks)),
        "attributes of nn.Module": {name: id(value) for name, value in vars(nn.Module).items()},
    }
    for place in _PLACES:
        for name, value in list(vars(place).items()):
            if callable(value):
                state[f"{place.__name__}.{name}"] = value
            elif "hooks" in name and hasattr(value, "__len__"):
                state[f"{place.__name__}.{name}"] = len(value)
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences. Functions that a newly imported module of torch has added do not count, but replaced ones do."""
    return [f"{name}: {value}, now {after.get(name)}" for name, value in before.items() if after.get(name) != value]
