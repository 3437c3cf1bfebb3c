"""Cards and networks: how long an operator and a collective take.

An operator takes the longer of two times: its operations divided by the card's rate, and its bytes divided by the
memory's rate. The first is a share of the peak of its dtype, the *efficiency*. Each kernel also takes a constant time.

A collective of ``S`` bytes over ``n`` ranks is a ring. Each rank receives ``S (n - 1) / n`` over the link within its
machine. If a group has ``l`` ranks on each machine, the machine receives ``S (n - l) / n`` over its network card, of
which a group has the share ``l / m`` if the machine has ``m`` ranks, because equal groups communicate at the same time.
The slower link decides::

    seconds = latency + max(S (n - 1) / n / within,  S (n - l) / n / (between * l / m))

The latency is that of each link, for each of the ``n - 1`` steps of the ring. An all-reduce takes twice as long.

Worked example, an all-gather of 800 MB over two machines of 8 ranks, 200 GB/s within a machine and 100 GB/s between:
within 800 MB * 15/16 / 200 GB/s = 3.75 ms; between 800 MB * 8/16 / 100 GB/s = 4 ms. So it takes 4 ms and the latencies.

Measured times of collectives replace the formula: `measured_costs` reads the file that ``python -m spec_tools.gpu``
writes.

*In torch:* ``RuntimeEstimator`` has such a model for operators.

Spec: SIMULATE-06, SIMULATE-07.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minifsdp.engine.messages import message
from minifsdp_tools.simulate.tape import Collective, Kernel

NAMES = {"AG": "all-gather", "RS": "reduce-scatter", "AR": "all-reduce"}


@dataclass(frozen=True)
class Card:
    """An accelerator. Rates are in operations or bytes per second.

    Attributes:
        matmul: the peak rate of matrix products in bfloat16 and float16.
        matmul32: the same in float32.
        efficiency: the share of the peak that large matrix products reach.
        attention: the share of the peak that fused attention reaches; ``None`` for the same share.
        bandwidth: the rate of the memory.
        bandwidth_efficiency: the share of it that operators reach.
        memory: bytes.
        kernel: seconds that each kernel takes at least.
        host_operator: seconds of the CPU thread for each operator.
        host_collective: seconds of the CPU thread for each collective.
        host_event: seconds of the CPU thread for each event or wait.
        slowdown: the share of a collective's time by which computation next to it takes longer.
        is_cpu: whether the CPU thread computes itself, so it issues nothing while a kernel runs.
    """

    name: str
    matmul: float
    matmul32: float
    bandwidth: float
    memory: float
    efficiency: float = 0.7
    attention: float | None = None
    bandwidth_efficiency: float = 0.8
    kernel: float = 2e-6
    host_operator: float = 6e-6
    host_collective: float = 25e-6
    host_event: float = 1e-6
    slowdown: float = 0.0
    is_cpu: bool = False

    def seconds(self, kernel: Kernel) -> float:
        """The time of an operator."""
        peak = self.matmul32 if kernel.dtype in (torch.float32, None) else self.matmul
        of_attention = self.attention if "scaled_dot_product" in kernel.name else None
        compute = kernel.flops / ((of_attention or self.efficiency) * peak)
        return self.kernel + max(
            compute, kernel.num_bytes / (self.bandwidth_efficiency * self.bandwidth)
        )


# From the data sheets: peaks without sparsity; TF32 is off by default, so float32 uses no tensor cores.
CARDS = {
    "A100-40": Card(
        "A100-40",
        matmul=312e12,
        matmul32=19.5e12,
        bandwidth=1.555e12,
        memory=40e9,
        efficiency=0.75,
    ),
    "A100-80": Card(
        "A100-80",
        matmul=312e12,
        matmul32=19.5e12,
        bandwidth=2.039e12,
        memory=80e9,
        efficiency=0.75,
    ),
    "H100": Card(
        "H100",
        matmul=989e12,
        matmul32=67e12,
        bandwidth=3.35e12,
        memory=80e9,
        efficiency=0.55,
    ),
    "H200": Card(
        "H200",
        matmul=989e12,
        matmul32=67e12,
        bandwidth=4.8e12,
        memory=141e9,
        efficiency=0.55,
    ),
}


@dataclass(frozen=True)
class Network:
    """The links of a job. Rates are in bytes per second and in one direction.

    Attributes:
        ranks_per_machine: ranks that share the network card of a machine.
        within: the rate at which each rank receives from the other ranks of its machine.
        between: the rate at which a machine receives from other machines.
        latency_within, latency_between: seconds for each step of a ring that uses this link.
        efficiency: the share of both rates that collectives reach.
        costs: measured collectives, see `measured_costs`.
    """

    ranks_per_machine: int = 8
    within: float = 300e9
    between: float = 200e9
    latency_within: float = 1.5e-6
    latency_between: float = 6e-6
    efficiency: float = 0.8
    costs: Mapping[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, collective: Collective) -> float:
        """The time of a collective, from when all ranks have reached it."""
        num = len(collective.ranks)
        size = collective.num_bytes
        if measured := self.costs.get((NAMES.get(collective.kind, ""), num)):
            latency, rate = measured
            return latency + size / rate
        if num == 1:
            return 0.0
        machines = len({rank // self.ranks_per_machine for rank in collective.ranks})
        local = num / machines
        transfer = size * (num - 1) / num / self.within if local > 1 else 0.0
        latency = (num - machines if machines > 1 else num - 1) * self.latency_within
        if machines > 1:
            share = self.between * local / self.ranks_per_machine
            transfer = max(transfer, size * (num - local) / num / share)
            latency += machines * self.latency_between
        seconds = latency + transfer / self.efficiency
        return 2 * seconds if collective.kind == "AR" else seconds


def measured_costs(path: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """Latency and rate of each measured collective and number of ranks, from a file ``gpu-report.json``.

    Raises:
        ValueError: if the file has another format, or ranks shared a device when it was measured.
    """
    found = json.loads(path.read_text())
    if found.get("format") != 1 or "collectives" not in found:
        raise ValueError(message("simulate-costs", path=path))
    if found.get("shared"):
        raise ValueError(message("simulate-shared-device", path=path))
    return {
        (one["collective"], one["ranks"]): (one["latency"], one["rate"])
        for one in found["collectives"]
    }
