"""The number of collectives in a step of ``fully_shard``, compared with the expected number and with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from spec_tests import oracles
from spec_tests.harness import ranks
from spec_tests.models import MODELS, apis, running
from spec_tests.models.modules import wide
from spec_tests.subject import fully_shard


@pytest.mark.spec("FS2-09", "FS2-13", "FS2-17")
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@ranks(2)
def test_the_collectives_are_those_of_torch_in_the_same_order(reshard_after_forward: bool | None) -> None:
    sent = []
    for api in (apis.FULLY_SHARD, apis.FULLY_SHARD.of_torch()):
        model = api.shard(wide(), reshard_after_forward=reshard_after_forward)
        with running.Wire() as wire:
            running.iterate(model, 0)
            running.iterate(model, 1)
        sent.append(wire.values)
    assert sent[0] == sent[1]


# All-gathers and reduce-scatters in a step of three blocks.
COUNTS = {
    "blocks": (6, 3),
    "called_twice": (12, 3),
    "several_forwards": (11, 3),
    "checkpoint_inside": (6, 3),
    "checkpoint_inside_reentrant": (6, 3),
    "checkpoint_outside": (6, 3),
    "checkpoint_outside_reentrant": (6, 3),
}


def usual_step(library: Any, name: str, **options: Any) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a step, measured after steps in which every unit was used."""
    model, recipe = oracles.shard_fsdp2(library, MODELS[name], **options), oracles.Recipe()
    for step in (0, 1):
        oracles.forward_backward(model, MODELS[name], recipe, dist.get_rank(), step)
    with oracles.count_collectives() as counts:
        oracles.forward_backward(model, MODELS[name], recipe, dist.get_rank(), 1)
    return counts.gathers_and_reductions


@pytest.mark.spec("FS2-17", "PAR-07")
@pytest.mark.parametrize("name", COUNTS)
@ranks(2)
def test_step_of_three_blocks_has_expected_number_of_collectives(name: str) -> None:
    assert usual_step(fully_shard, name) == COUNTS[name]


# Those whose numbers of collectives the tests above do not state: other graphs, and units that are used several times.
@pytest.mark.spec("FS2-17", "PAR-03")
@pytest.mark.parametrize(
    "name",
    ["nested", "tied", "shared_module", "several_forwards", "sometimes", "frozen", "unused", "lstm", "transformer"],
)
@ranks(2)
def test_no_model_takes_more_collectives_than_in_torch(name: str) -> None:
    ours, theirs = usual_step(fully_shard, name), usual_step(torch_fsdp.fully_shard, name)
    assert ours[0] <= theirs[0], "gathers"
    assert ours[1] == theirs[1], "reductions"
