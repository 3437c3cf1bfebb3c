"""The calculator on the page computes what ``minifsdp.cost`` computes, on a grid of jobs."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from minifsdp.cost import Job, cost_of

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "assets" / "js" / "calculator.js"
NAMES = {
    "num_shards": "numShards",
    "num_replicas": "numReplicas",
    "per_parameter": "perParameter",
    "rests_with": "restsWith",
    "forward_prefetch": "forwardPrefetch",
    "backward_prefetch": "backwardPrefetch",
    "micro_batches": "microBatches",
    "no_sync": "noSync",
}
MODELS: list[dict[str, Any]] = [
    {"units": [[(1000,)]] * 4},
    {"units": [[(7, 5), (3,)], [(64, 64), (64,), (2, 3)], [(11,)]], "root": [(5, 3), (1,)]},
    {"units": [], "root": [(13, 2), (7,)]},
]


def jobs() -> list[Job]:
    found = []
    strategies = [
        ("FULL_SHARD", 4, 1),
        ("SHARD_GRAD_OP", 2, 1),
        ("NO_SHARD", 1, 4),
        ("HYBRID_SHARD", 2, 3),
        ("_HYBRID_SHARD_ZERO2", 3, 2),
    ]
    dtypes = [
        (torch.float32, None, None),
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.bfloat16, torch.float32),
    ]
    for model, (strategy, shards, replicas), (stored, compute, reduce), micro, each in itertools.product(
        MODELS, strategies, dtypes, [(1, False), (2, True), (3, True), (2, False)], [False, True]
    ):
        found.append(
            Job(
                **model,
                strategy=strategy,
                num_shards=shards,
                num_replicas=replicas,
                stored=stored,
                compute=compute,
                reduce=reduce,
                micro_batches=micro[0],
                no_sync=micro[1],
                per_parameter=each,
            )
        )
    base = found[len(found) // 3]
    changes: list[dict[str, Any]] = [
        {"offload": True},
        {"forward_prefetch": True},
        {"backward_prefetch": False},
        {"rests_with": 2, "num_shards": 4},
        {"scratch": 4},
        {"buffers": 100, "buffer": torch.float16},
        {"activations": 12345},
        {"optimizer": 0},
        {"num_shards": 1},
    ]
    for change, strategy in itertools.product(changes, ["FULL_SHARD", "SHARD_GRAD_OP"]):
        found.append(Job(**{**vars(base), **MODELS[1], "strategy": strategy, **change}))
    return found


def as_script(job: Job) -> dict[str, Any]:
    return {
        NAMES.get(key, key): str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in asdict(job).items()
    }


def in_script(code: str, given: Any) -> Any:
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        pytest.skip("no node is installed to run the page's script")
    program = (
        f"const c = require({json.dumps(str(SCRIPT))}); const given = JSON.parse(require('fs').readFileSync(0));{code}"
    )
    done = subprocess.run([node, "-e", program], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("COST-01", "COST-02", "COST-03", "COST-06", "COST-07", "COST-08")
def test_both_give_the_same_numbers_for_every_job() -> None:
    grid = jobs()
    theirs = in_script("console.log(JSON.stringify(given.map(c.costOf)))", [as_script(job) for job in grid])
    assert len(grid) > 300
    for job, found in zip(grid, theirs, strict=True):
        cost = cost_of(job)
        ours = [cost.stored, cost.host, cost.after_backward, cost.peak_forward, cost.peak_backward, cost.peak_optimizer]
        keys = ["stored", "host", "afterBackward", "peakForward", "peakBackward", "peakOptimizer"]
        assert [found[key] for key in keys] == pytest.approx(ours), job
        assert found["sent"] == pytest.approx(cost.sent), job
        assert found["numCollectives"] == cost.num_collectives, job


@pytest.mark.parametrize("text", ["4 * 1000", "root: 5x3, 1\n7x5, 3\n2 * 11  # two of them"])
def test_a_model_is_read_from_lines(text: str) -> None:
    found = in_script("console.log(JSON.stringify(c.parseModel(given)))", text)
    expected = {
        "4 * 1000": {"units": [[[1000]]] * 4, "root": []},
        "root: 5x3, 1\n7x5, 3\n2 * 11  # two of them": {
            "units": [[[7, 5], [3]], [[11]], [[11]]],
            "root": [[5, 3], [1]],
        },
    }
    assert found == expected[text]


@pytest.mark.parametrize("text", ["", "4 * ", "7x, 3", "seven", "-3"])
def test_nonsense_is_refused_with_its_line(text: str) -> None:
    message = in_script(
        "try { c.parseModel(given); console.log('null') } catch (e) { console.log(JSON.stringify(e.message)) }", text
    )
    assert message is not None
