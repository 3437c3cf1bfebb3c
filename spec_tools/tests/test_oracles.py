"""Comparisons and counters of the oracles are correct.

Nothing here is about minifsdp. A comparison of minifsdp with an oracle is only as good as both, so both are tested on
cases with a known answer. ``spec_tests/parity`` compares minifsdp with each oracle, and so the oracles with each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests import oracles
from spec_tests.harness import device, ranks
from spec_tests.models import MODELS
from spec_tests.models.apis import WRAPPED

# --- comparing ---


def a_record(**changes: Any) -> oracles.Record:
    parameters = {"a": torch.ones(2), "b": torch.arange(6.0).view(2, 3)}
    record = oracles.Record(torch.zeros(3, 2), parameters, {"b": torch.ones(2, 3)}, {"mean": torch.zeros(1)})
    return replace(record, **changes)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": torch.zeros(2, 2)}, r"\(2, 2\) losses"),
        ({"losses": torch.full((3, 2), torch.nan)}, "loss of each rank in micro-batch 0 differs in 2 of 2"),
        ({"parameters": {"a": torch.ones(2)}}, r"missing here \['b'\]"),
        ({"parameters": {"a": torch.ones(1), "b": torch.ones(2, 3)}}, r"'a': torch.float32 of shape \(1,\) here"),
        ({"parameters": {"a": torch.ones(2), "b": torch.ones(2, 3)}}, r"'b' differs in 5 of 6 .* is 4, at \(1, 2\)"),
        ({"gradients": {}}, r"gradients differ by name: missing here \['b'\]"),
        ({"gradients": {"b": torch.zeros(2, 3)}}, "last gradient of 'b' differs in 6 of 6"),
        ({"gradients": {"a": torch.zeros(2), "b": torch.ones(2, 3)}}, r"gradients .* unknown to the oracle \['a'\]"),
        ({"buffers": {"mean": torch.ones(1)}}, "buffer 'mean' differs"),
    ],
)
def test_any_difference_is_found(changes: dict[str, Any], message: str) -> None:
    oracles.assert_same_training(a_record(), a_record(), oracles.BIT_EQUAL, buffers=True)
    with pytest.raises(AssertionError, match=message):
        oracles.assert_same_training(a_record(**changes), a_record(), oracles.BIT_EQUAL, buffers=True)


# --- counting ---


@pytest.mark.parametrize(
    # Three units. The root is all-gathered once, and each block once in forward and once in backward, in each call.
    ("name", "gathers"),
    [("blocks", 6), ("called_twice", 9), ("checkpoint_outside", 6)],
)
@ranks(2)
def test_counter_counts_every_collective_of_a_step(name: str, gathers: int) -> None:
    info, recipe = MODELS[name], oracles.Recipe()
    model = WRAPPED.of_torch().shard(info.build().to(device()), unit_classes=info.unit_classes)
    oracles.forward_backward(model, info, recipe, dist.get_rank(), step=0)
    with oracles.count_collectives() as counts:
        oracles.forward_backward(model, info, recipe, dist.get_rank(), step=1)
    assert counts.gathers_and_reductions == (gathers, 3)
    # 280 parameters in a unit, no padding.
    assert counts.num_bytes == {"all_gather": gathers * 1120, "reduce_scatter": 3 * 1120}


@ranks(2)
def test_counter_counts_calls_on_the_process_group() -> None:
    group, local_shard, whole = dist.group.WORLD, torch.ones(3, device=device()), torch.empty(6, device=device())
    with oracles.count_collectives() as counts:
        group._allgather_base(whole, local_shard).wait()
        group._reduce_scatter_base(local_shard, whole).wait()
        group.allreduce([local_shard]).wait()
    assert counts.order == [("all_gather", 24), ("reduce_scatter", 24), ("all_reduce", 12)]
