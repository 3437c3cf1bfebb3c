"""The page "Checkpoints at scale": its measurements, its record and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        assert all(seconds > 0 for seconds in of_api["seconds"].values())
        assert of_api["num_files"] == expected.num_files
        # The file format adds up to 3 kB for each tensor.
        assert 0 < of_api["file_bytes"] - expected.file_bytes(0) < 3000 * expected.num_listed()
        assert of_api["memory"]["save_full"] >= expected.total_bytes()


def test_record_agrees_with_the_formulas() -> None:
    record = load("checkpoint-scale")
    assert sorted(map(int, record["runs"])) == list(checkpoint_scale.SIZES)
    for num_ranks, run in record["runs"].items():
        expected = measure.checkpoint(int(num_ranks))
        for api, of_api in run["apis"].items():
            assert of_api["num_files"] == expected.num_files
            # The file format adds about 3 percent on 8 ranks.
            assert expected.file_bytes(0) < of_api["file_bytes"] < 1.04 * expected.file_bytes(0)
            is_flat = api != "fully_shard"
            asynchronous = expected.async_memory(0, is_flat=is_flat)
            assert of_api["memory"]["begin_async_save"] == pytest.approx(asynchronous, rel=0.02)


def record_of(metadata_bytes: dict[int, int]) -> dict[str, Any]:
    """A record with the same values for both APIs."""
    calls = dict.fromkeys(checkpoint_scale.CALLS, 0.002)
    of_api = {"seconds": calls, "memory": dict.fromkeys(calls, 4_000_000), "num_files": 3, "file_bytes": 5_000_000}
    runs = {
        str(num_ranks): {"apis": {api: {**of_api, "metadata_bytes": size} for api in measure.APIS}, "others": 0.5}
        for num_ranks, size in metadata_bytes.items()
    }
    facts = {"model": "a model", "repeats": 5, "date": "2026-01-01", "machine": "a machine"}
    return json.loads(json.dumps({**facts, "runs": runs}))  # type: ignore[no-any-return]


def test_tables_have_a_row_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs_build.recording.records.load", lambda name: record_of({2: 1000, 8: 4000}))
    assert "| `fully_shard` | 8 | 2 | 2 | 2 | 2 |" in checkpoint_scale.seconds()
    assert "Other programs used up to 0.5 cores." in checkpoint_scale.seconds()
    assert "| `fully_shard` | 2 | 4 MB | 4 MB | 4 MB | 4 MB | 0 B | 3 | 5 MB | 1 kB |" in checkpoint_scale.memory()


def test_metadata_of_many_ranks_is_extrapolated_from_its_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    few, most = measure.checkpoint(2).num_listed(), measure.checkpoint(8).num_listed()
    # 500 bytes, and 100 for each entry.
    record = record_of({2: 500 + 100 * few, 8: 500 + 100 * most})
    assert checkpoint_scale.bytes_of_entry(record) == 100
    monkeypatch.setattr("docs_build.recording.records.load", lambda name: record)
    row = checkpoint_scale.many().splitlines()[-1]
    listed = Checkpoint(llama_70b(), 1024).num_listed()
    assert row.startswith("| 1024 | 1025 | 827 MB |")
    assert row.endswith(f"| {listed:,} | {listed * 100 / 1e6:.0f} MB |")


def test_a_run_keeps_the_runs_with_other_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(checkpoint_scale, "measured", lambda ranks: {"apis": {}, "others": None})
    monkeypatch.setattr(checkpoint_scale, "load", lambda name: {"runs": {"2": "old", "4": "old"}})
    monkeypatch.setattr(checkpoint_scale, "save", lambda name, record: saved.append((name, record["runs"])))
    checkpoint_scale.main("4")
    assert saved == [("checkpoint-scale", {"2": "old", "4": {"apis": {}, "others": None}})]
