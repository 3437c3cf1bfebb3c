"""What `minifsdp.tools` says a contender of ours needs at its worst moment, to be laid beside what was measured.

A sharded model is asked for its job (`minifsdp.explain`), and the job is told what a model cannot know: how a step is
taken, and what the batch leaves behind in forward. These *activations* are counted: the tensors that a forward of the
plain model makes and that are alive when it is over, because backward will read them. Worked example, `wide`::

    four units of 16 MiB on two ranks: weights and two moments, of each a half     96    MiB
    the backward of the third unit: parameters, gradients, a reduction             80    MiB
    activations: what comes out of four matrices for 16 rows, and the loss          0.62 MiB
    together                                                                      176.62 MiB    measured: 176.50

The formula takes all activations as there during all of forward and backward, though they are given back one by one.
So where activations are many, it is an upper bound; what it must never be is less than what was measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import minifsdp
from minifsdp.tools import cost
from spec_tests.benchmarks.workloads import Batch, Workload
from spec_tests.live_bytes import LiveBytes

__all__ = ["activation_bytes", "cost_of"]

# AdamW with ``foreach`` makes one intermediate result for all parameters at once, in float32.
SCRATCH = 4


def cost_of(model: nn.Module, workload: Workload, batches: list[Batch]) -> cost.Cost:
    """The answer of the calculator, for a model in the hands of a contender of ours."""
    job = replace(
        minifsdp.explain(model, optimizer="AdamW").job,
        scratch=SCRATCH,
        micro_batches=workload.accumulate,
        no_sync=workload.accumulate > 1,
        activations=activation_bytes(workload, batches[0]),
    )
    return cost.cost_of(job)


def activation_bytes(workload: Workload, batch: Batch) -> int:
    """What a forward of the plain model leaves, the loss included."""
    model = workload.model()
    if workload.bf16:
        model.to(torch.bfloat16)
        for unit in workload.units_of(model):
            unit.register_forward_pre_hook(_to_low)
    inputs, targets = batch
    with LiveBytes() as live:
        loss = workload.loss(model(inputs).float(), targets)
        kept = live.now()
    del loss
    return kept


def _to_low(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the wrapper casts what it is called with."""
    return tuple(x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)
