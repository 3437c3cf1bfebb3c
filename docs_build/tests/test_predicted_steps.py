"""The table of steps that are predicted for the machine of the tests, and measured on it."""

import pytest

from docs_build.pages import published
from docs_build.reading.order import ROOT
from docs_build.recording import predicted_steps, records


@pytest.mark.spec("CHECKED-06")
def test_summary_counts_predictions_within_the_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "workload": "gpt",
            "num_ranks": ranks,
            "strategy": "FULL_SHARD",
            "predicted": predicted,
            "measured": 0.1,
            "fastest": 0.09,
            "slowest": 0.12,
        }
        for ranks, predicted in ((2, 0.095), (2, 0.13), (4, 0.1))
    ]
    record = {"rows": rows, "date": "2026-01-02", "machine": "a machine", "rounds": 2, "repeats": 3}
    monkeypatch.setattr(records, "load", lambda name: record)
    text = predicted_steps.summary()
    assert "With 2 ranks, 1 of 2 predictions are within 10 %. The errors are -5.0 to +30.0 %." in text
    assert "With 4 ranks, 1 of 1" in text
    lines = predicted_steps.steps().splitlines()
    assert lines[2] == "| `gpt` | 2 | `FULL_SHARD` | 95 ms | 100 ms (90 to 120) | -5.0 % |"
    assert lines[-1].startswith("2026-01-02, a machine; medians of 2 rounds with 3 steps each. In brackets:")


@pytest.mark.spec("CHECKED-06")
def test_record_has_each_model_with_two_and_four_ranks() -> None:
    rows = records.load(predicted_steps.NAME)["rows"]
    assert {(row["workload"], row["num_ranks"]) for row in rows} == {
        (name, ranks) for name in ("gpt", "wide") for ranks in (2, 4)
    }


@pytest.mark.spec("CHECKED-05")
def test_tables_of_published_rows_are_those_of_the_file() -> None:
    rows = published.predictions().splitlines()
    assert "| mosaicml a100-40 mpt-70b 64 | 384.59 tokens/s | 276 tokens/s | +39.3 % |" in rows
    assert "| torchtitan h100 llama3-8b 8 eager | 5,752 tokens/s | 5,762 tokens/s | -0.2 %, fitted |" in rows
    # The time of 14 rows is fitted.
    assert sum("fitted" in row for row in rows) == 56 - int(published.summary().splitlines()[2].split(" | ")[1])
    page = (ROOT / "docs" / "tools" / "simulator-checked.md").read_text(encoding="utf-8")
    tables = ("summary", "predictions", "constants", "absent")
    assert all(f"{{{{ table published-{name} }}}}" in page for name in tables)
