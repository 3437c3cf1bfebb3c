"""The page "Ranks, collectives and torchrun": its record, and a new run."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from docs_build.recording import collectives, records
from spec_tests.harness import ranks


@pytest.mark.spec("LEARN-07")
@pytest.mark.cpu
@ranks(2)
def test_recorded_collectives_are_those_of_a_new_run() -> None:
    recorded = records.load(collectives.NAME)["ranks"][dist.get_rank()]
    assert {name: [*values] for name, values in collectives.observe().items()} == recorded
    for name, values in recorded.items():
        assert all(f"`{value}`" in collectives.collectives() for value in values), name


@pytest.mark.spec("LEARN-07")
def test_script_of_the_page_prints_the_recorded_output() -> None:
    recorded = records.load(collectives.NAME)["script"]
    assert collectives.output_of_script() == recorded
    for line in recorded:
        # All-reduce is reduce-scatter and all-gather.
        _, gathered, reduced = re.findall(r"\[.*?\]", line)
        assert gathered == reduced
        assert line in collectives.output()
