"""The page "Checkpoints at scale": its measurements and its record agree with the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.recording import checkpoint_scale
from docs_build.recording.records import load
from spec_tests.harness import ranks
from spec_tools.processes import checkpoint_costs as measure
from spec_tools.processes.checkpoint_sizes import Checkpoint, llama_70b


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
@ranks(2)
def test_every_call_is_measured_with_each_api(tmp_path: Path) -> None:
    found = measure.measure(tmp_path, width=64, num_blocks=2, repeats=1)
    expected = measure.checkpoint(2, width=64, num_blocks=2)
    assert tuple(found) == measure.APIS
    for of_api in found.values():
        assert of_api["seconds"].keys() == of_api["memory"].keys() == checkpoint_scale.CALLS.keys()
        assert of_api["num_files"] == expected.num_files
        # The file format adds up to 3 kB for each tensor.
        assert 0 < of_api["file_bytes"] - expected.file_bytes(0) < 3000 * expected.num_listed()


def test_record_agrees_with_the_formulas() -> None:
    record = load("checkpoint-scale")
    assert sorted(map(int, record["runs"])) == list(checkpoint_scale.SIZES)
    for num_ranks, run in record["runs"].items():
        expected = measure.checkpoint(int(num_ranks))
        for api, of_api in run["apis"].items():
            assert of_api["num_files"] == expected.num_files
            # The file format adds about 3 percent on 8 ranks.
            assert expected.file_bytes(0) < of_api["file_bytes"] < 1.04 * expected.file_bytes(0)
            asynchronous = expected.async_memory(0, is_flat=api != "fully_shard")
            assert of_api["memory"]["begin_async_save"] == pytest.approx(asynchronous, rel=0.02)


def test_metadata_of_many_ranks_is_extrapolated_from_its_growth() -> None:
    large = Checkpoint(llama_70b(), 1024)
    each = checkpoint_scale.bytes_of_entry(load("checkpoint-scale"))
    row = checkpoint_scale.many().splitlines()[-1]
    assert row.startswith("| 1024 | 1025 | 827 MB |")
    assert row.endswith(f"| {large.num_listed():,} | {large.num_listed() * each / 1e6:.0f} MB |")
