"""The smallest adapter: step 4 of ``tutorials/naive_fsdp.py`` as a wrapper. It shows the necessary parts of an adapter.

It shards one unit for each block that the policy names, and one for the rest. It has no state dicts and no
``fully_shard``, it needs modules that return one tensor, and it refuses all options. The classes of the options are
those of torch, because the tests build options while they are collected.
"""

# A test finds these names as attributes of this module.
# ruff: noqa: F401, F403

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, wrap
from torch.distributed.fsdp.api import *
from torch.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

from minifsdp import trace
from minifsdp.engine.events import events
from spec_tests.subject import NotOfferedError

# The tutorials are programs, and import their shared module by its file name.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tutorials"))

from naive_fsdp import Log, Unit, reduce_and_scatter

# Tests pass the default values of options, too.
DEFAULTS = {
    "sharding_strategy": ShardingStrategy.FULL_SHARD,
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "cpu_offload": CPUOffload(offload_params=False),
    "mixed_precision": MixedPrecision(),
    "device_id": torch.device("cpu"),
    "use_orig_params": False,
    "sync_module_states": False,
    "forward_prefetch": False,
    "limit_all_gathers": True,
}


class RecordedEvents(list[str]):
    """The tutorial's list of events, such as ``"AG blocks.0"``. It also writes them to minifsdp's recorder."""

    def append(self, event: str) -> None:
        super().append(event)
        if events.recorder is not None:
            kind, _, unit = event.partition(" ")
            events.recorder.begin(kind, unit)


class FullyShardedDataParallel(nn.Module):
    """The tutorial's units with the constructor of torch's wrapper."""

    def __init__(self, module: nn.Module, *, auto_wrap_policy: Any = None, **options: object) -> None:
        super().__init__()
        options = {name: option for name, option in options.items() if option not in (None, DEFAULTS.get(name))}
        if options:
            raise NotOfferedError(f"the naive engine has no option {', '.join(options)}")
        self.module, log = module, Log()
        log.events = RecordedEvents()
        classes = tuple(getattr(auto_wrap_policy, "_module_classes", ()))
        blocks = [(name, child) for name, child in module.named_modules() if name and isinstance(child, classes)]
        # The root is last, so that its unit has the parameters that no block has.
        units = [
            Unit(name, part, log) for name, part in [*blocks, ("", module)] if any(True for _ in part.parameters())
        ]
        reduce_and_scatter(units)
        for unit in units:
            unit.module.register_parameter("_flat_param", unit.shard)

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self.module(*arguments, **named)
