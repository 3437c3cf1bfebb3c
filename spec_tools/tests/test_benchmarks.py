"""The report of the benchmarks, and what a step sends. The benchmarks themselves are not run by the test command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_tests.harness import ranks
from spec_tools.benchmarks import steps
from spec_tools.benchmarks.workloads import WORKLOADS


@ranks(4)
@pytest.mark.cpu
def test_a_hybrid_step_shards_inside_of_a_group_and_reduces_between_groups() -> None:
    workload = replace(WORKLOADS["tiny"], strategy="HYBRID_SHARD", num_ranks=4)
    whole = 48 * 4 * (32 * 32 + 32)
    sent = {}
    for name in ("DDP", "minifsdp flat", "minifsdp FSDP2"):
        trainer, batches = steps.Trainer(name, workload), workload.batches(0, 0)
        # DDP sends its order of parameters in the second step.
        trainer.step(batches)
        found = steps.figures(lambda trainer=trainer, batches=batches: trainer.step(batches))
        sent[name] = found["inside"], found["asked"] - found["inside"]
    # Two all-gathers and a reduce-scatter in a group of two, then an all-reduce of this rank's half.
    assert sent["minifsdp flat"] == sent["minifsdp FSDP2"] == (3 * whole // 2, whole // 2)
    assert sent["DDP"] == (0, 2 * whole * 3 // 4)


@ranks(2)
@pytest.mark.cpu
def test_a_contender_that_trains_to_other_losses_is_refused() -> None:
    workload = WORKLOADS["tiny"]
    assert steps.check_losses(steps.Trainer("minifsdp flat", workload), "minifsdp flat") <= workload.tolerance
    # Each rank trains on its own batches only.
    with pytest.raises(AssertionError, match="to other losses than one process does"):
        steps.check_losses(steps.Trainer("single", workload), "minifsdp flat")
