"""A message says which rank speaks, and where more is to be read."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from minifsdp.engine.messages import message, rank_of_this_process
from spec_tests.harness import ranks


@ranks(2)
def test_a_message_begins_with_the_rank_and_ends_with_the_address() -> None:
    assert rank_of_this_process() == dist.get_rank()
    first, last = message("never-gathered", name="blocks.0").split("\n")
    assert first == f"rank {dist.get_rank()}: unit 'blocks.0' is waited for but was never gathered"
    assert last.endswith(" troubleshoot.html#E-never-gathered")


@pytest.mark.pure
def test_without_a_process_group_a_message_names_rank_0() -> None:
    assert not dist.is_initialized()
    assert message("no-modules").startswith("rank 0: ")
