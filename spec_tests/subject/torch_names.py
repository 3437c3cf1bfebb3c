"""The adapter for torch's own FSDP1 and FSDP2.

Without a GPU, torch's wrapper needs ``device_id=torch.device("cpu")``, and the tests do not pass it. So the adapter
changes the default. `torch_events` records the events of both APIs.
"""

# A test finds these names as attributes of this module.
# ruff: noqa: F401, F403

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import *
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, UnshardHandle, share_comm_ctx, wrap
from torch.distributed.fsdp._fully_shard import DataParallelMeshDims
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from minifsdp import trace
from spec_tests.harness import device
from spec_tests.subject import torch_events

FILTERS = (
    "ignore::FutureWarning:torch",
    "ignore::UserWarning:torch",
    "ignore:FSDP:UserWarning",
    "ignore:`_get_pg_default_device`:UserWarning",
    "ignore:.*NO_SHARD:FutureWarning",
    "ignore:.*deprecated:FutureWarning",
)


def _with_device(init: Any) -> Any:
    position = list(inspect.signature(init).parameters).index("device_id")

    @functools.wraps(init)
    def construct(self: FullyShardedDataParallel, *arguments: Any, **named: Any) -> None:
        if device().type != "cuda" and len(arguments) < position:
            named.setdefault("device_id", device())
        init(self, *arguments, **named)

    return construct


FullyShardedDataParallel.__init__ = _with_device(FullyShardedDataParallel.__init__)
torch_events.install()
