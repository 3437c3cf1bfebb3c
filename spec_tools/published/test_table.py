"""The published measurements: the file is complete, and its figures agree with each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from spec_tools.published import table
from spec_tools.published.models import MPTS, mpt_parameters

arithmetic = pytest.mark.proof("arithmetic")
MPT_ROWS = [row for row in table.load() if row.model in MPTS]


@pytest.mark.spec("PUBLISHED-01")
def test_all_sources_have_rows() -> None:
    rows = table.load()
    of_source = Counter(row.source.split(" ")[0] for row in rows)
    assert of_source["mosaicml/llm-foundry"] == 40
    assert {"torchtitan", "KempnerForge", "IBM", "cosmos-framework", "PyTorch"} < of_source.keys()
    of_card = Counter(row.card for row in MPT_ROWS)
    assert of_card == {"H100 80 GB": 17, "A100 80 GB": 7, "A100 40 GB": 16}


@pytest.mark.spec("PUBLISHED-01")
def test_an_empty_cell_is_none_and_not_zero() -> None:
    rows = {row.row: row for row in table.load()}
    h100 = rows["mosaicml h100 mpt-7b 8"]
    assert (h100.network, h100.memory_gib, h100.gpus_per_machine) == (None, None, None)
    assert (h100.tokens_per_second, h100.mfu, h100.micro_batch) == (10643, 46.44, 6)
    assert rows["kempnerforge 7B FSDP 4"].derived == "model parameters tokens_per_second"


@pytest.mark.spec("PUBLISHED-01")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",10643,", ",many,", "line 2: tokens_per_second is 'many'"),
        (",10643,", ",0,", "line 2: tokens_per_second is 0.0, which is not positive"),
        (",10643,46.44,46.44,", ",10643,146.44,46.44,", "line 2: mfu is 146.44 percent"),
        (",10643,46.44,", ",,,", "line 2: the row has no measurement"),
        (",10643,", ",10643,1,", "line 2: the line has another number of cells"),
        (",none,", ",some,", "line 2: checkpointing is 'some'"),
        (",8,,", ",,,", None),
        ("mfu,", "mfu_percent,", "expected"),
    ],
)
def test_wrong_lines_are_refused(old: str, new: str, message: str | None, tmp_path: Path) -> None:
    header, *lines = table.FILE.read_text(encoding="utf-8").splitlines()
    text = f"{header}\n{next(line for line in lines if line.startswith('mosaicml h100 mpt-7b 8,'))}\n"
    assert old in text
    path = tmp_path / "rows.csv"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    if message is None:
        assert table.load(path)[0].num_gpus is None
        return
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        table.load(path)


@pytest.mark.spec("PUBLISHED-01")
def test_repeated_names_and_derived_columns_without_a_value_are_refused(tmp_path: Path) -> None:
    header, line, *_ = table.FILE.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{line}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="more than once"):
        table.load(path)
    path.write_text(f"{header}\n{line}memory_gib\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"derived names \['memory_gib'\]"):
        table.load(path)


@pytest.mark.spec("PUBLISHED-02")
@arithmetic
@pytest.mark.parametrize("row", MPT_ROWS, ids=lambda row: row.row)
def test_parameters_are_those_of_the_layers(row: table.Row) -> None:
    assert row.model is not None
    assert row.sequence_length is not None
    assert mpt_parameters(MPTS[row.model], row.sequence_length) == row.parameters


@pytest.mark.spec("PUBLISHED-03")
@arithmetic
def test_stated_mfu_follows_from_tokens_per_second() -> None:
    rows = table.load()
    assert [(row.row, row.mfu, mfu) for row, mfu in table.misfits(rows)] == []
    names = [row.row for row in table.uncheckable(rows)]
    assert names == ["kempnerforge 13B FSDP 8", "kempnerforge TP 4", "kempnerforge TP 2 x FSDP 2"]
    num_checked = sum(row.mfu is not None for row in rows) - len(names)
    assert num_checked == 45


@pytest.mark.spec("PUBLISHED-03")
@arithmetic
@pytest.mark.parametrize("row", MPT_ROWS, ids=lambda row: row.row)
def test_other_figures_do_not_fit(row: table.Row) -> None:
    """The tolerance is small: it detects an error of 1 percent, and a formula without attention."""
    assert row.mfu is not None
    assert row.parameters is not None
    assert table.misfits([row]) == []
    assert len(table.misfits([replace(row, mfu=1.01 * row.mfu)])) == 1
    assert len(table.misfits([replace(row, sequence_length=1)])) == 1


@pytest.mark.spec("PUBLISHED-04")
@arithmetic
@pytest.mark.parametrize("row", [row for row in MPT_ROWS if row.hfu], ids=lambda row: row.row)
def test_hfu_includes_the_second_forward(row: table.Row) -> None:
    assert row.mfu is not None
    factor = 4 / 3 if row.checkpointing == "full" else 1
    assert row.hfu == pytest.approx(factor * row.mfu, abs=0.012)
