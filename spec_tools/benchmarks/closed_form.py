"""The peak memory of minifsdp's contenders according to `minifsdp_tools`, for comparison with the measured peak.

`minifsdp.explain` returns the job of a sharded model. This module adds two facts that are not in the model: the course
of a step, and the size of the activations. *Activations* are tensors that a forward of the plain model creates and that
are still alive after it, because backward reads them. They are measured. Worked example, `wide`::

    four units of 16 MiB on two ranks: one half of weights and two moments         96    MiB
    the backward of the third unit: parameters, gradients, a reduction             80    MiB
    activations: the outputs of four matrices for 16 rows, and the loss             0.62 MiB
    together                                                                      176.62 MiB    measured: 176.50

Activations are given for each unit, because backward frees them unit by unit. Temporary tensors inside a unit are not
included; here they are at most a few percent of the unit's size.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import minifsdp
from minifsdp_tools import cost
from spec_tests.live_bytes import LiveBytes
from spec_tools.benchmarks.workloads import Batch, Workload

__all__ = ["activations", "cost_of"]

# AdamW with ``foreach`` makes one intermediate result for all parameters at once, in float32.
SCRATCH = 4


def cost_of(model: nn.Module, workload: Workload, batches: list[Batch]) -> cost.Cost:
    """The result of the calculator for a model of one of minifsdp's contenders."""
    job = replace(
        minifsdp.explain(model, optimizer="AdamW").job,
        scratch=SCRATCH,
        micro_batches=workload.accumulate,
        no_sync=workload.accumulate > 1,
        activations=activations(workload, batches[0]),
    )
    return cost.cost_of(job)


def activations(workload: Workload, batch: Batch) -> list[int]:
    """Bytes of the activations of a plain model: before the first unit, in each unit, and after the last."""
    model, (inputs, targets) = workload.model(), batch
    if workload.bf16:
        model.to(torch.bfloat16)
    live, reached = LiveBytes(), [0]

    def begin(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        reached.append(live.now())
        return tuple(map(_low, arguments)) if workload.bf16 else arguments

    def end(*_: Any) -> None:
        reached.append(live.now())

    *_, last = units = workload.units_of(model)
    for unit in units:
        unit.register_forward_pre_hook(begin)
    last.register_forward_hook(end)
    with live:
        loss = workload.loss(model(inputs).float(), targets)
        end()
    del loss
    return [later - earlier for earlier, later in itertools.pairwise(reached)]


def _low(value: Any) -> Any:
    """Casts an argument of a unit in the same way as the wrapper."""
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value
