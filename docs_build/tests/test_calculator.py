"""The page's calculator computes the same as ``minifsdp_tools.cost`` on a grid of jobs, and refuses invalid input."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from dataclasses import asdict, replace
from itertools import chain
from math import prod
from typing import Any

import pytest
import torch

from docs_build.reading.order import ROOT
from minifsdp_tools.cost import Cluster, Job, activation_bytes, cost_of, operations, sent_by_link, step_time

SCRIPTS = ROOT / "docs" / "assets" / "js"
MODELS: list[dict[str, Any]] = [
    {"units": [[(1000,)]] * 4},
    {"units": [[(7, 5), (3,)], [(64, 64), (64,), (2, 3)], [(11,)]], "root": [(5, 3), (1,)]},
    {"units": [], "root": [(13, 2), (7,)]},
]
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "FULL_SHARD", "num_shards": 4},
    {"strategy": "SHARD_GRAD_OP", "num_shards": 2},
    {"strategy": "NO_SHARD", "num_replicas": 4},
    {"strategy": "HYBRID_SHARD", "num_shards": 2, "num_replicas": 3},
    {"strategy": "_HYBRID_SHARD_ZERO2", "num_shards": 3, "num_replicas": 2},
]
DTYPES: list[dict[str, Any]] = [
    {},
    {"compute": torch.bfloat16},
    {"compute": torch.bfloat16, "reduce": torch.float32},
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2, "no_sync": True},
    {"micro_batches": 3, "no_sync": True},
    {"micro_batches": 2},
    {"offload": True},
    {"forward_prefetch": True},
    {"backward_prefetch": False},
    {"scratch": 4},
    {"buffers": 100, "buffer": torch.float16},
    {"activations": 12345},
    {"optimizer": 0},
]
JOBS = [
    Job(**model, **strategy, **dtypes, **change, per_parameter=each)
    for model, strategy, dtypes, change, each in itertools.product(MODELS, STRATEGIES, DTYPES, CHANGES, (False, True))
]
JOBS += [Job(**MODELS[1], num_shards=4, reshards_to=2, per_parameter=True), Job(**MODELS[1], num_shards=1)]


def name_in_script(name: str) -> str:
    """The script writes ``numShards`` for ``num_shards``."""
    first, *others = name.replace("reshards_to", "rests_with").split("_")
    return first + "".join(map(str.capitalize, others))


def as_script(job: Job) -> dict[str, Any]:
    return {
        name_in_script(key): str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in asdict(job).items()
    }


def in_script(expression: str, given: Any) -> Any:
    """A JavaScript expression with the calculator's modules; ``given`` is its input."""
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        pytest.skip("no node is installed to run the page's script")
    files = {"c": "cost", "models": "models", "inputs": "inputs"}
    loads = "".join(f"const {name} = require('{SCRIPTS}/calculator-{file}.js');" for name, file in files.items())
    program = f"{loads} const given = JSON.parse(require('fs').readFileSync(0));"
    program += f"console.log(JSON.stringify({expression}))"
    done = subprocess.run([node, "-e", program], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("COST-01", "COST-02", "COST-03", "COST-06", "COST-07", "COST-08")
def test_page_and_package_give_the_same_costs_for_every_job() -> None:
    theirs = in_script("given.map(c.costOf)", [as_script(job) for job in JOBS])
    for job, found in zip(JOBS, theirs, strict=True):
        cost = cost_of(job)
        for name in ("stored", "host", "after_backward", "peak_forward", "peak_backward", "peak_optimizer"):
            assert found[name_in_script(name)] == pytest.approx(getattr(cost, name)), (name, job)
        assert found["sent"] == pytest.approx(cost.sent), job
        assert found["numCollectives"] == cost.num_collectives, job


@pytest.mark.spec("COST-15", "COST-16", "COST-17", "COST-18")
@pytest.mark.parametrize("per_machine", [1, 3, 8])
@pytest.mark.parametrize("again", [False, True])
def test_page_and_package_give_the_same_links_times_and_estimates_for_every_job(
    per_machine: int, *, again: bool
) -> None:
    cluster = Cluster(per_machine, operations=1e5, within=3e3, between=7e2)
    code = """given.jobs.map((job) => {
        const cluster = { perMachine: given.perMachine, operations: 1e5, within: 3e3, between: 7e2 };
        const count = c.operations(job, 17, given.again);
        const time = c.stepTime(job, count, cluster);
        return [c.sentByLink(job, given.perMachine), count, c.activationBytes(job, 17, given.again), time];
    })"""
    theirs = in_script(code, {"jobs": [as_script(job) for job in JOBS], "perMachine": per_machine, "again": again})
    for job, (links, count, activations, time) in zip(JOBS, theirs, strict=True):
        for kind, sent in sent_by_link(job, per_machine).items():
            assert links[kind] == pytest.approx(asdict(sent)), job
        assert count == operations(job, 17, checkpointing=again), job
        assert activations == pytest.approx(activation_bytes(job, 17, checkpointing=again)), job
        assert time == pytest.approx(asdict(step_time(job, count, cluster))), job


@pytest.mark.spec("SLIDERS-06")
@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_answers_of_the_page_are_those_of_the_package_with_joined_blocks(blocks: int) -> None:
    code = """(({ read }) => [read.model, inputs.answer(read).strategies])(
        inputs.readAll(inputs.fromAddress("#ranks=16&machines=2&blocks=" + given)))"""
    model, answers = in_script(code, blocks)
    units = model["units"]
    several = [list(chain(*units[n : n + blocks])) for n in range(0, len(units), blocks)]
    sizes = {"NO_SHARD": (1, 16), "FULL_SHARD": (16, 1), "SHARD_GRAD_OP": (16, 1)}
    for found in answers:
        shards, replicas = sizes.get(found["strategy"], (8, 2))
        job = Job(**model, strategy=found["strategy"], num_shards=shards, num_replicas=replicas, per_parameter=True)
        job = replace(job, compute=torch.bfloat16)
        activations = activation_bytes(job, 4096, checkpointing=True)
        cost = cost_of(replace(job, units=several, activations=activations))
        assert found["peak"] == pytest.approx(cost.peak)
        assert found["priced"]["sent"] == pytest.approx(cost.sent)
        assert found["priced"]["numCollectives"] == cost.num_collectives
        assert found["count"] == operations(job, 4096, checkpointing=True)


# ---- models and inputs ----

# The parameter counts that the publishers give.
NUM_PARAMETERS = {"Llama-3 8B": 8_030_261_248, "Llama-3 70B": 70_553_706_496, "GPT, 124 M": 124_439_808}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_model_has_its_true_size(name: str) -> None:
    found = in_script("models.parseModel(models.PRESETS[given])", name)
    shapes = [shape for unit in [*found["units"], found["root"]] for shape in unit]
    assert sum(map(prod, shapes)) == NUM_PARAMETERS[name]


def test_model_description_is_parsed_from_lines() -> None:
    text = "root: 5x3, 1\n7x5, 3\n2 * 11  # two of them"
    expected = {"units": [[[7, 5], [3]], [[11]], [[11]]], "root": [[5, 3], [1]]}
    assert in_script("models.parseModel(given)", text) == expected
