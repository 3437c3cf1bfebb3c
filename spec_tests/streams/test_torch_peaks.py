"""Peak memory on the simulated accelerator is not above that of torch's FSDP of the same kind."""

from __future__ import annotations

import json

import pytest
import torch

from spec_tests.harness import rank_among_fake_ranks
from spec_tests.models.torch_names import IS_2_15
from spec_tests.streams import peaks

LARGEST_GRADIENT = max(sum(4 * parameter.numel() for parameter in unit.parameters()) for unit in peaks.network())
ON_TWO = [name for name, case in peaks.CASES.items() if case.num_ranks == 2]
ON_FOUR = [name for name, case in peaks.CASES.items() if case.num_ranks == 4]


def allowed_above_torch(kind: str, name: str) -> float:
    """Gradients that wait for their reduction are stored separately from those of the unit in backward."""
    if kind != "fully_shard" or peaks.CASES[name].micro_batches == 1:
        return 0.0
    # At the peak, less than half of the latter exist. torch 2.15 adds the new gradients to those that wait, so it has
    # none of the latter.
    return LARGEST_GRADIENT if IS_2_15 else LARGEST_GRADIENT / 2


def assert_recorded(kind: str, name: str, ours: int, theirs: int) -> None:
    """The page shows the record. The peak of torch's FSDP depends on its version."""
    recorded = json.loads(peaks.RECORD.read_text(encoding="utf-8"))
    here, there = recorded["peaks"][name][kind]
    same_torch = recorded["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert ours == here, "not as on the page: python -m spec_tests.streams.peaks --record"
    # torch's FSDP allocates two scalars once in a process, which may have been in an earlier test.
    is_recorded = there - theirs in (0, 32)
    assert is_recorded or not same_torch, "not as on the page: python -m spec_tests.streams.peaks --record"


@pytest.mark.spec("STREAM-17")
@pytest.mark.parametrize("name", ON_TWO)
@pytest.mark.parametrize("kind", peaks.KINDS)
@rank_among_fake_ranks(2)
def test_two_ranks_peak_no_higher_than_with_torch(kind: str, name: str) -> None:
    ours, theirs = peaks.peaks(kind, peaks.CASES[name])
    assert ours <= theirs + allowed_above_torch(kind, name)
    assert_recorded(kind, name, ours, theirs)


@pytest.mark.spec("STREAM-17")
@pytest.mark.parametrize("name", ON_FOUR)
@pytest.mark.parametrize("kind", peaks.KINDS)
@rank_among_fake_ranks(4)
def test_replicas_peak_no_higher_than_with_torch(kind: str, name: str) -> None:
    ours, theirs = peaks.peaks(kind, peaks.CASES[name])
    assert ours <= theirs
    assert_recorded(kind, name, ours, theirs)
