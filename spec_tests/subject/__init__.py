"""The implementation that the tests test: minifsdp, torch's own FSDPs, or another one.

Tests import the public names of FSDP from here, and never from ``minifsdp``::

    from spec_tests.subject import FullyShardedDataParallel, fully_shard, trace

``python -m pytest --engine torch`` runs the same tests on torch's FSDPs. ``--engine package.module`` runs them on any
other implementation. The module is an *adapter*, and its attributes are:

==================  ==================================================================================================
attribute           meaning
==================  ==================================================================================================
a public name       ``FullyShardedDataParallel``, ``fully_shard``, ``ShardingStrategy``, and the other names in `NAMES`,
                    with the arguments and results of torch. An adapter may omit any of them.
``wrap``            a namespace with the functions of ``torch.distributed.fsdp.wrap``
``trace``           a namespace with ``record()``, a context manager that yields a ``minifsdp.trace.Recorder``, and with
                    ``recorder``, the installed one or None. ``minifsdp/debugging/trace.py`` defines the events.
``FILTERS``         warning filters in pytest's syntax, for warnings that the engine emits in correct programs
==================  ==================================================================================================

A name that the adapter omits becomes a `NotOffered`. A test that uses it fails with `NotOfferedError`, and the record
of the run counts the test as "not offered". Tests that also use names of minifsdp itself do not run with another engine
(see ``own.py``).

``minifsdp_names.py`` and ``torch_names.py`` are adapters. ``naive_names.py`` is the smallest example.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["ENGINE", "NAMES", "NotOffered", "NotOfferedError", "engine"]

VARIABLE = "MINIFSDP_SPEC_ENGINE"
ADAPTERS = {name: f"spec_tests.subject.{name}_names" for name in ("minifsdp", "torch", "naive")}

NAMES = [
    # the wrapper
    *("FullyShardedDataParallel", "FlatParameter", "BackwardPrefetch", "CPUOffload", "MixedPrecision"),
    *("ShardingStrategy", "ShardedGradScaler", "OptimStateKeyType", "StateDictSettings", "StateDictType"),
    *("StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig"),
    *("OptimStateDictConfig", "FullOptimStateDictConfig", "LocalOptimStateDictConfig", "ShardedOptimStateDictConfig"),
    # fully_shard
    *("fully_shard", "FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"),
    *("DataParallelMeshDims", "register_fsdp_forward_method", "share_comm_ctx"),
    # policies
    *("CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap", "lambda_auto_wrap_policy"),
    *("size_based_auto_wrap_policy", "transformer_auto_wrap_policy"),
    # state dicts of both APIs
    *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
    *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
    # namespaces
    *("wrap", "trace"),
]


class NotOfferedError(Exception):
    """A test uses a name that the engine does not offer."""


class NotOffered:
    """Stands for a name that the engine does not offer. Any use except reading an attribute fails."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> NotOffered:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotOffered(f"{self.name}.{name}")

    def __call__(self, *arguments: object, **named: object) -> Any:
        raise NotOfferedError(f"the engine {ENGINE} does not offer {self.name}")

    __enter__ = __iter__ = __instancecheck__ = __mro_entries__ = __call__

    def __repr__(self) -> str:
        return f"<{self.name}, not offered by {ENGINE}>"


ENGINE = os.environ.get(VARIABLE, "minifsdp")
# The adapter that the session's `--engine` names.
engine = importlib.import_module(ADAPTERS.get(ENGINE, ENGINE))


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(engine, name, NotOffered(name))
