"""The page "Ranks, collectives and torchrun": its table and the output of its script are those of a new run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from docs_build.reading.order import ROOT
from docs_build.recording.records import torchrun
from spec_tests.harness import ranks

PAGE = (ROOT / "docs" / "learn" / "ranks.md").read_text(encoding="utf-8")
# The call, the values of `x` on both ranks, and the results on both ranks.
ROWS = re.findall(r"^\| `(dist\..*)` \| `(.*)` \| `(.*)` \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.spec("LEARN-07")
@pytest.mark.cpu
@ranks(2)
def test_each_collective_of_the_table_has_the_results_of_the_page() -> None:
    assert [row[0].partition("(")[0] for row in ROWS] == [
        "dist.broadcast",
        "dist.all_reduce",
        "dist.all_gather",
        "dist.reduce_scatter",
    ]
    for call, *values in ROWS:
        before, expected = (eval(values[first + dist.get_rank()]) for first in (0, 2))
        x, result = torch.tensor(before), torch.empty(len(expected), dtype=torch.int64)
        eval(call, {"dist": dist, "x": x, "result": result})
        assert (result if "result" in call else x).tolist() == expected, call


@pytest.mark.spec("LEARN-07")
def test_script_of_the_page_prints_the_output_of_the_page(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "ranks.py").write_text(script, encoding="utf-8")
    done = torchrun(["--standalone", "--nproc-per-node", "2", "--tee", "3", str(tmp_path / "ranks.py")])
    printed = [line.partition(":")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(printed) == output.splitlines(), done.stderr
    for line in printed:
        # All-reduce is reduce-scatter and all-gather.
        _, gathered, reduced = re.findall(r"\[.*?\]", line)
        assert gathered == reduced
