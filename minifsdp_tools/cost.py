"""A calculator for the cost of a step: stored bytes, peak bytes, sent bytes.

Nothing here runs a model. The sizes of the units and a few choices answer two questions before training starts: does it
fit, and how much communication does it need? The choices are a `Job`, in ``job.py``. The peaks are in ``peaks.py``, and
the formulas of stored and sent bytes in ``formulas.py``. This module also has the names of
``activations.py`` and ``links.py`` that programs import.

Worked example, four units of 1000 float32 parameters, Adam, two ranks, ``FULL_SHARD``::

    stored                 (4 + 8) bytes * 4000 / 2         24 000    weights and two moments, a half of each
    gathered in backward   4 bytes * (1000 + 1000)           8 000    this unit, and the prefetched next one
    its gradient           4 bytes * 1000                    4 000
    one reduction          4 bytes * (1000 + 500)            6 000    of the unit before: its input and its output
    reduced already        4 bytes * 1000 / 2                2 000    of the fourth unit, while the second one runs
    peak                                                    44 000

    sent     all-gather 2, reduce-scatter 1, each 4 bytes * 4000 * 1/2: 24 000 for each rank and step

The rules:

1. *between steps* a rank stores 1/N of weights, gradients and optimizer state; padding adds at most N - 1 elements to a
   unit. A replica stores as much as the original: only the size of the shard group counts;
2. *in forward* one unsharded unit is added, two with prefetching, and the root's own parameters, which stay. With
   ``SHARD_GRAD_OP`` all units are added. The largest unit matters, and N does not: a unit that is larger than the
   memory does not fit, on any number of ranks. If there is only one unit, it is the whole model;
3. *in backward* the unsharded gradient is added, and one reduction in flight. When the reduction is complete, a
   gradient of several parameters is concatenated or sorted, which briefly needs two copies of it. Without
   synchronization the unsharded gradients of the whole model are kept;
4. *in the optimizer's step* the sharded gradients and the optimizer's intermediate results are added.

A frozen parameter has no gradient and no state; in a flat unit this only holds if the whole unit is frozen.

Activations are not included. They depend on the batch and on the model's code, and can be added as the ``activations``
of a `Job`; ``activations.py`` has an estimate. Internal buffers of NCCL and gloo are not included either. If the job
sets ``by_messages``, the buffers that minifsdp needs to send between CPUs are included; an all-gather of large
parameters then needs no buffer for sorting. On a GPU the CPU runs ahead, and up to two units are in flight where the
rules for forward count one.

Sent bytes are those of the ring algorithms. In units of P * b * (N - 1) / N, for P parameters of b bytes on N ranks:
DDP 2, ``SHARD_GRAD_OP`` 2, ``FULL_SHARD`` 3, or a little less, since the root's own parameters are all-gathered once.
``links.py`` computes them, which links they use, and a lower bound for the time.

``spec_tools/explain/test_cost.py`` tests that live storages on the CPU and recorded collectives equal these numbers. It
also tests the tables of arXiv 1910.02054 and 2304.11277. ``docs_build/reading/papers.py`` shows a mistake in the
second.

*In torch:* nothing comparable.

Spec: COST-01 to COST-10, COST-19, COST-20, EXPLAIN-04.
"""

from dataclasses import dataclass
from typing import Any

import torch

from minifsdp_tools.activations import activation_bytes, operations
from minifsdp_tools.job import Job
from minifsdp_tools.links import (
    Cluster,
    Sent,
    StepTime,
    num_collectives,
    sent_by_link,
    sent_bytes,
    step_time,
)
from minifsdp_tools.peaks import peak_of_backward, peak_of_forward

__all__ = [
    "Cluster",
    "Cost",
    "Job",
    "Sent",
    "StepTime",
    "activation_bytes",
    "cost_of",
    "memory_line",
    "num_collectives",
    "operations",
    "print_memory",
    "sent_by_link",
    "sent_bytes",
    "step_time",
]


@dataclass(frozen=True)
class Cost:
    """The cost for one rank; all in bytes. Activations are only included where noted.

    Attributes:
        stored: on the device, between steps, with gradients cleared.
        host: the same, on the host.
        after_backward: on the device, before the optimizer's step.
        peak_forward, peak_backward, peak_optimizer: peaks on the device in each phase, including activations.
        sent: by each rank in a step, by kind of collective: ``AG``, ``RS``, ``AR``.
        num_collectives: issued in a step, by kind.
    """

    stored: float
    host: float
    after_backward: float
    peak_forward: float
    peak_backward: float
    peak_optimizer: float
    sent: dict[str, float]
    num_collectives: dict[str, int]

    @property
    def peak(self) -> float:
        """The peak of the step."""
        return max(self.peak_forward, self.peak_backward, self.peak_optimizer)


def cost_of(job: Job) -> Cost:
    """All costs of a job."""
    states = job.parameter_bytes + job.optimizer_bytes
    on_device, host = (0.0, states) if job.offload else (states, 0.0)
    stored = on_device + job.buffers * (job.buffer or job.stored).itemsize
    gradients = job.settled(sum(job.gradients))
    # From the second micro-batch on, the gradients of the first exist in forward as well.
    earlier = sum(job.gradients) if job.no_sync else gradients
    # The peak is in the first backward of the step, in a middle one, or in the last.
    backwards = {0, job.micro_batches // 2, job.micro_batches - 1}
    return Cost(
        stored=stored,
        host=host,
        after_backward=stored + gradients,
        peak_forward=stored
        + (earlier if job.micro_batches > 1 else 0.0)
        + peak_of_forward(job),
        peak_backward=stored
        + max(peak_of_backward(job, number) for number in backwards),
        peak_optimizer=stored
        + (0.0 if job.offload else gradients + job.num_trained * job.scratch),
        sent=sent_bytes(job),
        num_collectives=num_collectives(job),
    )


# ---- allocated memory -----------------------------------------------------------------------------------------------


def memory_line(allocated: float, peak: float, label: str = "memory") -> str:
    """Formats bytes as ``"memory: 1.2346 GB allocated, 2.0000 GB at most"`` (COST-10); a GB is 10**9 bytes."""
    return f"{label}: {allocated / 1e9:.4f} GB allocated, {peak / 1e9:.4f} GB at most"


def print_memory(label: str = "memory", device: Any = None) -> None:
    """Prints the accelerator's allocated memory on the rank that calls it; on a CPU, a note that there is none."""
    if not torch.accelerator.is_available():
        print(f"{label}: no accelerator, and PyTorch does not count the CPU's memory")
        return
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    print(
        memory_line(
            module.memory_allocated(device), module.max_memory_allocated(device), label
        )
    )
