"""A replacement for ``torch.distributed.fsdp`` for one process with the whole model and batch: nothing is sharded.

A drop-in program can be run with three libraries: torch, minifsdp and this one. Where torch's wrapper does not support
the CPU, this one computes the expected numbers. It runs the same lines of the same program without any sharding.

Inside `as_if_alone` a program sees only one rank. A program that takes every ``world_size``-th sample starting at
``rank`` therefore takes all samples. All ranks then do the same work, each on its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["FullyShardedDataParallel", "as_if_alone"]


class FullyShardedDataParallel:
    """Returns the module, with a wrapper's methods added. Materializes the module if it is on the meta device."""

    def __new__(
        cls,
        module: nn.Module,
        *,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: torch.device | None = None,
        **_: Any,
    ) -> Any:
        for part in list(module.modules()):
            if param_init_fn is not None and any(t.is_meta for t in [*part._parameters.values(), *part.buffers(False)]):
                param_init_fn(part)
        plain: Any = module if device_id is None else module.to(device_id)
        plain.clip_grad_norm_ = lambda limit: nn.utils.clip_grad_norm_(module.parameters(), limit)
        plain.params_with_grad = list(module.parameters())
        return plain

    @staticmethod
    def summon_full_params(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    state_dict_type = summon_full_params

    @staticmethod
    def set_state_dict_type(*_: Any) -> None:
        pass


def __getattr__(name: str) -> Any:
    # Options and policies are ignored.
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Inside, ``torch.distributed`` reports one process and does not communicate."""
    answers: dict[str, Any] = {
        "get_rank": lambda group=None: 0,
        "get_world_size": lambda group=None: 1,
        "is_initialized": lambda: False,
        "init_process_group": lambda *_: None,
        "all_reduce": lambda tensor: None,
        "barrier": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(dist, name, answer))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield
