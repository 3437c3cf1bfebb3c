"""The numbers of the page "Choosing", computed again with the formulas of the package."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from docs_build.reading.papers import model_states
from minifsdp_tools.cost import Job
from minifsdp_tools.links import sent_by_link
from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
HALF, PEAK = 40e9, 989e12  # bytes: half of a GPU's memory; operations per second of an H100
NUMBERS = {"parameter": 4.0, "gradient": 4.0, "optimizer": 8.0}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = PAGE.partition(heading)[2].partition("\n|")[2].splitlines()
    end = next(number for number, line in enumerate(lines) if not line)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def largest(num_shards: int, unsharded: float = 0.0) -> float:
    """Billions of parameters whose states, and unsharded bytes for each parameter, need half of the memory."""
    states = model_states(1, **{name: size / num_shards for name, size in NUMBERS.items()})
    return HALF / (states + unsharded) / 1e9


def test_largest_models_equal_those_of_the_formulas() -> None:
    found = {int(ranks): cells for ranks, *cells in rows_of("### Memory")}
    for ranks, cells in found.items():
        computed = [largest(1), largest(8), largest(ranks, 2.0), largest(ranks)]
        expected = [f"{number:.1f}" for number in computed]
        if ranks == 8:
            # On one machine it is `FULL_SHARD`.
            expected[1] = ""
        assert cells == expected
    assert list(found) == [8, 16, 64]


def test_thresholds_table_agrees_with_the_calculated_sizes() -> None:
    rules = " ".join(" ".join(row) for row in rows_of("## Thresholds"))
    assert f"{largest(1):g} billion parameters with 80 GB, {largest(1) * 24 / 80:g} billion with 24 GB" in rules
    fewest = [-(-32 * billions // 80) for billions in (7, 70)]
    assert "{} GPUs of 80 GB for 7 billion, {} for 70 billion".format(*fewest) in rules


def model_crossings(strategy: str, machines: int) -> tuple[float, float]:
    """The number of times that a bfloat16 model crosses each kind of link, for each rank and step."""
    hybrid = strategy == "HYBRID_SHARD"
    shards, replicas = (8, machines) if hybrid else (8 * machines, 1)
    job = Job(
        [[(4096, 4096)]] * 4,
        strategy=strategy,
        num_shards=shards,
        num_replicas=replicas,
        compute=torch.bfloat16,
    )
    sent, size = sent_by_link(job, 8).values(), 4 * 4096 * 4096 * 2
    return sum(link.within for link in sent) / size, sum(link.between for link in sent) / size


def tokens(crossings: float, bandwidth: float) -> str:
    return f"{round(crossings / 3 * PEAK / bandwidth, -2):,.0f}"


def test_the_tokens_are_those_of_the_formulas() -> None:
    table = rows_of("{ #tokens }")
    assert table[0][1:] == ["1", tokens(model_crossings("FULL_SHARD", 1)[0], 450e9), ""]
    for bandwidth, machines, *cells in table[1:]:
        gigabytes = float(re.search(r"([\d.]+) GB/s", bandwidth)[1])  # type: ignore[index]
        expected = [
            tokens(model_crossings(strategy, int(machines))[1], gigabytes * 1e9)
            for strategy in ("FULL_SHARD", "HYBRID_SHARD")
        ]
        assert cells == expected
    assert len(table) == 5


def test_snippet_that_replaces_the_names_of_torch_works() -> None:
    """A module that imports torch's names afterwards trains with this package."""
    page = (ROOT / "docs" / "job-fails.md").read_text(encoding="utf-8")
    snippet = page.partition("```python\n")[2].partition("```")[0]
    program = (
        snippet
        + """
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for model in (FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu")), fully_shard(torch.nn.Linear(2, 2))):
    model(torch.ones(1, 2)).sum().backward()
print(fully_shard.__module__.split(".")[0], FSDP.__module__.split(".")[0])
dist.destroy_process_group()
"""
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "minifsdp minifsdp"
