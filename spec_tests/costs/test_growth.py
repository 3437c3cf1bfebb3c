"""Costs that must not grow with the model or the number of ranks, and costs that are allowed to grow.

``count_growth.py`` counts them in separate processes. ``spec_tools/benchmarks/growth.py`` also measures times.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests.costs.count_growth import OURS, PARAMETERS, SHAPE
from spec_tests.harness.programs import run_module
from spec_tools.benchmarks.growth import Decoder

pytestmark = pytest.mark.pure


@functools.cache
def counted(ranks: int) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    done = run_module("spec_tests.costs.count_growth", str(ranks), folder=root, environment=os.environ)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.spec("COST-12")
@pytest.mark.parametrize("name", OURS)
def test_a_further_unit_costs_as_many_calls_as_the_one_before(name: str) -> None:
    twelve, twice, four_times = counted(2)[name]["units"]
    assert four_times - twice == 2 * (twice - twelve) > 0


@pytest.mark.spec("COST-12")
@pytest.mark.parametrize("name", OURS)
def test_a_step_makes_as_many_calls_on_1024_ranks_as_on_two(name: str) -> None:
    assert counted(1024)[name]["units"] == counted(2)[name]["units"]


@pytest.mark.spec("COST-13")
def test_further_parameters_of_a_flat_unit_cost_no_calls() -> None:
    calls = counted(2)["minifsdp flat"]["parameters"]
    # The plain model, whose cost is subtracted, calls nn.Module.__getattr__ once per parameter. A view of a flat
    # parameter does not need that call. The model has 2 units.
    assert [more + 2 * number for more, number in zip(calls, PARAMETERS, strict=True)] == 3 * [calls[0] + 8]


@pytest.mark.spec("COST-13")
@pytest.mark.parametrize("name", OURS)
def test_calls_grow_at_most_linearly_with_the_parameters_of_a_unit(name: str) -> None:
    four, sixteen, sixty_four = counted(2)[name]["parameters"]
    assert sixty_four - sixteen <= 4 * (sixteen - four)


@pytest.mark.spec("COST-14")
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("ranks", [2, 64])
def test_meta_model_is_stored_in_shard_bytes_only(name: str, ranks: int) -> None:
    assert counted(ranks)[name]["stored"] == (by_parameter(ranks) if name.endswith("FSDP2") else by_unit(ranks))


def by_unit(ranks: int) -> int:
    """The bytes on rank 0 if each unit is padded once."""
    blocks, rest = numels()
    return sum(4 * -(-sum(unit) // ranks) for unit in [*blocks, rest])


def by_parameter(ranks: int) -> int:
    """The bytes on rank 0 if rank 0 stores the first rows of each parameter."""
    shapes = [parameter.shape for parameter in decoder().parameters()]
    return sum(4 * -(-shape[0] // ranks) * shape[1:].numel() for shape in shapes)


def numels() -> tuple[list[list[int]], list[int]]:
    model = decoder()
    blocks = [[weight.numel() for weight in block.parameters()] for block in model.blocks]
    others = (model.embedding, model.norm, model.head)
    return blocks, [weight.numel() for module in others for weight in module.parameters()]


def decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(SHAPE)
