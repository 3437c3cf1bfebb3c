"""``python -m spec_tools.published.here``: predicts training steps on this machine, and measures them.

::

    python -m spec_tools.published.here --ranks 2 4 --file build/here.json

The ranks are processes with gloo. Each has one thread, and all share the cores. So everything is measured while all
ranks do the same:

1. `rates` measures matrix products, copies and a small operator.
2. `phases` measures forward, backward and the optimizer's step of the model with FSDP on one rank, which does not
   communicate. The simulated durations of each phase are scaled to these times.
3. `collective_costs` measures all-gather, reduce-scatter and all-reduce of two sizes between computations, for the
   latency and the rate.
4. `slowdown` measures how much longer computation takes next to a collective.

The ranks keep the memory that they release, because the simulator has no cost for new memory.

These figures are measured without sharding a model, see ``measured.py``. Each strategy is predicted from them, and its
step is measured. Each round does all of this, because the speed of a machine changes over minutes. The result is the
median of the rounds. The recording is made in a process of its own, because it initializes a fake process group.

Worked example, forward on one rank takes 30 ms, and the simulated operators of forward take 24 ms together: each
of them is simulated with 1.25 times its duration.

Spec: CHECKED-06.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from minifsdp_tools.simulate.machine import Card, Network
from minifsdp_tools.simulate.models import Model
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import HYBRID, Setup
from minifsdp_tools.simulate.tape import Kernel
from spec_tools.benchmarks.workloads import WORKLOADS, Workload
from spec_tools.published.measured import LIMIT, Measured, measure

__all__ = ["Comparison", "CpuCard", "card_of", "compare_here"]

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured step: the medians of all rounds, and the fastest and the slowest round."""

    workload: str
    num_ranks: int
    strategy: str
    predicted: float
    measured: float
    fastest: float
    slowest: float

    @property
    def error_percent(self) -> float:
        """How much longer the predicted step is, in percent."""
        return 100 * (self.predicted / self.measured - 1)


# ---- prediction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuCard(Card):
    """A CPU whose operators in each phase are scaled to a measured total."""

    scales: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel) -> float:
        """The time of an operator."""
        return super().seconds(kernel) * self.scales.get(kernel.phase, 1.0)


def card_of(measured: Measured, alone: Recording) -> CpuCard:
    """The card that reproduces the measured phases of the model that was recorded on one rank."""
    card = CpuCard(
        "CPU", matmul=measured.matmul, matmul32=measured.matmul, bandwidth=measured.copy, memory=0.0, efficiency=1.0,
        bandwidth_efficiency=1.0, kernel=measured.operator, host_operator=0.0, host_collective=20e-6, host_event=0.0,
        slowdown=measured.slowdown, is_cpu=True,
    )  # fmt: skip
    predicted = dict.fromkeys(measured.phases, 0.0)
    for item in alone.tape.items:
        if isinstance(item, Kernel):
            predicted[item.phase] += card.seconds(item)
    return replace(card, scales={phase: seconds / predicted[phase] for phase, seconds in measured.phases.items()})


def setup_of(workload: str, num_ranks: int, strategy: str) -> Setup:
    """The simulated configuration, with two groups of ranks if the strategy is a hybrid one."""
    name = f"{__name__ if __name__ != '__main__' else 'spec_tools.published.here'}:{workload}"
    shards = num_ranks // 2 if strategy in HYBRID else None
    return Setup(
        name, num_ranks, num_ranks, "fsdp1", strategy, shards, micro_batch=1, param_dtype="fp32", reduce_dtype="fp32"
    )


def gpt(setup: Setup) -> Model:
    """The GPT of the benchmarks."""
    return _model(WORKLOADS["gpt"])


def wide(setup: Setup) -> Model:
    """The wide model of the benchmarks."""
    return _model(WORKLOADS["wide"])


def tiny(setup: Setup) -> Model:
    """The tiny model of the benchmarks, for tests."""
    return _model(WORKLOADS["tiny"])


def _model(workload: Workload) -> Model:
    with torch.device("meta"):
        module = workload.build()
    inputs, targets = (tensor.to("meta") for tensor in workload.draw(torch.Generator()))
    return Model(
        module, workload.units_of(module), lambda sharded: workload.loss(sharded(inputs), targets), len(inputs)
    )


# ---- command ---------------------------------------------------------------------------------------------------------


def compare_here(
    workload: str, num_ranks: int, strategies: Sequence[str], rounds: int, repeats: int
) -> list[Comparison]:
    """Predicts and measures the strategies. Hybrid ones need four ranks or more."""
    chosen = [strategy for strategy in strategies if strategy not in HYBRID or num_ranks >= 4]
    measured = measure(workload, num_ranks, chosen, rounds, repeats)
    setups = [setup_of(workload, 1, "NO_SHARD"), *(setup_of(workload, num_ranks, strategy) for strategy in chosen)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        alone, *recordings = pool.map_async(record, setups).get(timeout=LIMIT)
    found = []
    for strategy, recording in zip(chosen, recordings, strict=True):
        predicted = median(_predicted(one, alone, recording) for one in measured)
        steps = [one.steps[strategy] for one in measured]
        found.append(Comparison(workload, num_ranks, strategy, predicted, median(steps), min(steps), max(steps)))
    return found


def _predicted(measured: Measured, alone: Recording, recording: Recording) -> float:
    costs = {(kind, ranks): (lag, rate) for kind, ranks, lag, rate in measured.costs}
    return replay(recording, card_of(measured, alone), Network(recording.setup.num_ranks, costs=costs)).seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser("python -m spec_tools.published.here")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=("gpt", "wide", "tiny"), default=["gpt", "wide"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of prediction and measurement")
    parser.add_argument("--repeats", type=int, default=4, help="measurements of each figure in a round")
    parser.add_argument("--file", type=Path, help="write the result as JSON")
    given = parser.parse_args(arguments)
    found = []
    for workload in given.workloads:
        for num_ranks in given.ranks:
            for one in compare_here(workload, num_ranks, given.strategies, given.rounds, given.repeats):
                found.append(one)
                times = f"{one.predicted * 1e3:9.2f} ms predicted {one.measured * 1e3:9.2f} ms measured"
                print(
                    f"{workload:6} {num_ranks} ranks {one.strategy:20} {times} {one.error_percent:+6.1f} %", flush=True
                )
    if given.file is not None:
        rows = [{**asdict(one), "error_percent": one.error_percent} for one in found]
        given.file.write_text(
            json.dumps({"rounds": given.rounds, "repeats": given.repeats, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
