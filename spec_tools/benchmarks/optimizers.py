"""An AdamW step, or clipping by the norm of all gradients, with each kind of FSDP: what every rank does.

The model has many small parameters, because the cost of DTensors depends on their number and not on their size. AdamW
runs in three modes: torch's own choice (*default*), all parameters in one call (``foreach``), or one kernel for
everything (``fused``). Clipping is a method of FSDP1, or a function of torch for `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.workloads import WORKLOADS

NUM_UNITS = 72
MODEL = f"{NUM_UNITS} x Linear(32, 32), each a unit: {2 * NUM_UNITS} parameters"
ACTIONS = ("default", "foreach", "fused", "clipping")


def act(timer: Callable[..., None], contender: str, action: str) -> None:
    """Times one of `ACTIONS`. It needs gradients and keeps them."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(NUM_UNITS)))
    workload = replace(WORKLOADS["tiny"], build=lambda: layers)
    model: Any = CONTENDERS[contender].take(workload.model(), workload).model
    (inputs, targets), *_ = workload.batches(0, dist.get_rank())
    workload.loss(model(inputs), targets).backward()
    mode: dict[str, Any] = {action: True} if action in ("foreach", "fused") else {}
    optimizer = torch.optim.AdamW(model.parameters(), **mode)

    def clip() -> None:
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run = clip if action == "clipping" else optimizer.step
    for _ in range(3):
        run()
    timer(run)
