"""The page's calculator computes the same as ``minifsdp_tools.cost`` on a grid of jobs, and refuses invalid input."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from dataclasses import asdict, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from minifsdp_tools.cost import Cluster, Job, activation_bytes, cost_of, operations, sent_by_link, step_time

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "assets" / "js"
NAMES = {
    "num_shards": "numShards",
    "num_replicas": "numReplicas",
    "per_parameter": "perParameter",
    "reshards_to": "restsWith",
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
STRATEGIES = {
    "FULL_SHARD": (4, 1),
    "SHARD_GRAD_OP": (2, 1),
    "NO_SHARD": (1, 4),
    "HYBRID_SHARD": (2, 3),
    "_HYBRID_SHARD_ZERO2": (3, 2),
}
DTYPES = [(None, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]
CHANGES: list[dict[str, Any]] = [
    {"offload": True},
    {"forward_prefetch": True},
    {"backward_prefetch": False},
    {"reshards_to": 2, "num_shards": 4},
    {"scratch": 4},
    {"buffers": 100, "buffer": torch.float16},
    {"activations": 12345},
    {"optimizer": 0},
    {"num_shards": 1},
]


def jobs() -> list[Job]:
    micro_batches = [(1, False), (2, True), (3, True), (2, False)]
    found = [
        Job(**model, strategy=strategy, num_shards=shards, num_replicas=replicas, compute=compute, reduce=reduce,
            micro_batches=number, no_sync=no_sync, per_parameter=each)
        for model, (strategy, (shards, replicas)), (compute, reduce), (number, no_sync), each in itertools.product(
            MODELS, STRATEGIES.items(), DTYPES, micro_batches, (False, True)
        )
    ]  # fmt: skip
    base = replace(found[len(found) // 3], **MODELS[1])
    found += [replace(base, strategy=name, **change) for change in CHANGES for name in list(STRATEGIES)[:2]]
    return found


def as_script(job: Job) -> dict[str, Any]:
    return {
        NAMES.get(key, key): str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
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
    grid = jobs()
    theirs = in_script("given.map(c.costOf)", [as_script(job) for job in grid])
    assert len(grid) > 300
    for job, found in zip(grid, theirs, strict=True):
        cost = cost_of(job)
        ours = [cost.stored, cost.host, cost.after_backward, cost.peak_forward, cost.peak_backward, cost.peak_optimizer]
        keys = ["stored", "host", "afterBackward", "peakForward", "peakBackward", "peakOptimizer"]
        assert [found[key] for key in keys] == pytest.approx(ours), job
        assert found["sent"] == pytest.approx(cost.sent), job
        assert found["numCollectives"] == cost.num_collectives, job


@pytest.mark.spec("COST-15", "COST-16", "COST-17", "COST-18")
@pytest.mark.parametrize("per_machine", [1, 2, 3, 8])
def test_page_and_package_give_the_same_links_times_and_estimates_for_every_job(per_machine: int) -> None:
    grid, tokens = jobs(), 17
    cluster = Cluster(per_machine, operations=1e5, within=3e3, between=7e2)
    code = """given.jobs.map((job) => {
        const cluster = { perMachine: given.perMachine, operations: 1e5, within: 3e3, between: 7e2 };
        return { links: c.sentByLink(job, given.perMachine), both: [false, true].map((checkpointing) => {
            const count = c.operations(job, 17, checkpointing);
            return [count, c.activationBytes(job, 17, checkpointing), c.stepTime(job, count, cluster)];
        }) };
    })"""
    theirs = in_script(code, {"jobs": [as_script(job) for job in grid], "perMachine": per_machine})
    for job, found in zip(grid, theirs, strict=True):
        for kind, sent in sent_by_link(job, per_machine).items():
            assert found["links"][kind] == pytest.approx(asdict(sent)), job
        for checkpointing, (count, activations, time) in zip([False, True], found["both"], strict=True):
            assert count == operations(job, tokens, checkpointing=checkpointing), job
            assert activations == pytest.approx(activation_bytes(job, tokens, checkpointing=checkpointing)), job
            assert time == pytest.approx(asdict(step_time(job, count, cluster))), job


@pytest.mark.spec("SLIDERS-06")
@pytest.mark.parametrize("blocks", [1, 3, 8, 100])
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
        assert found["left"] == pytest.approx(80 * 2**30 - cost.peak)
        assert found["priced"]["sent"] == pytest.approx(cost.sent)
        assert found["priced"]["numCollectives"] == cost.num_collectives
        assert found["count"] == operations(job, 4096, checkpointing=True)


# ---- models and inputs ----


def test_model_description_is_parsed_from_lines() -> None:
    text = "root: 5x3, 1\n7x5, 3\n2 * 11  # two of them"
    expected = {"units": [[[7, 5], [3]], [[11]], [[11]]], "root": [[5, 3], [1]]}
    assert in_script("models.parseModel(given)", text) == expected


# The parameter counts that the publishers give.
NUM_PARAMETERS = {"Llama-3 8B": 8_030_261_248, "Llama-3 70B": 70_553_706_496, "GPT, 124 M": 124_439_808}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_model_has_its_true_size(name: str) -> None:
    found = in_script("models.parseModel(models.PRESETS[given])", name)
    shapes = [shape for unit in [*found["units"], found["root"]] for shape in unit]
    assert sum(map(prod, shapes)) == NUM_PARAMETERS[name]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1"),
        ("5\n\n# a comment\nseven", "line 4"),
        ("5\n-3", "line 2"),
        ("5\n0 * 4", "line 2: 0 units"),
        ("3000 * 4", "line 1: more than 2000 units"),
        ("9999999999x2", "line 1: a dimension of more"),
    ],
)
def test_invalid_model_description_is_refused_with_its_line(text: str, says: str) -> None:
    code = "(() => { try { models.parseModel(given); return null } catch (e) { return e.message } })()"
    assert str(in_script(code, text)).startswith(says)


@pytest.mark.parametrize(
    "field", ["ranks", "machines", "length", "sequences", "batches", "teraflops", "within", "between"]
)
def test_invalid_number_is_refused_at_its_field(field: str) -> None:
    wrong = ["", " ", "-1", "0", "abc", "NaN", "Infinity", "1e99"]
    code = "given.map((one) => inputs.readAll({ ...inputs.BEGINNING, ...one }).errors)"
    for errors in in_script(code, [{field: one} for one in wrong]):
        assert list(errors) == [field]
        assert "needed" in errors[field] or "at most" in errors[field]


def test_only_visible_fields_are_validated() -> None:
    code = "given.map((one) => inputs.readAll({ ...inputs.BEGINNING, ...one }).errors)"
    broken = {"activations": "-1", "gib": ""}
    shown = {**broken, "kept": "typed", "memory": "typed"}
    hidden, typed, divided = in_script(code, [broken, shown, {"ranks": "64", "machines": "5"}])
    assert hidden == {}
    assert list(typed) == ["activations", "gib"]
    assert divided == {"machines": "64 ranks do not divide over 5 machines"}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"ranks": "64", "machines": "8", "strategy": "HYBRID_SHARD"},
        {"offload": True, "nosync": True, "batches": "4"},
        {"compute": "", "ranks": ""},
        {"lines": "root: 5x3 # ü & = +\n4 * 7", "preset": ""},
    ],
)
def test_address_keeps_all_changed_inputs_and_no_default(changed: dict[str, Any]) -> None:
    code = """((texts) => [texts, inputs.toAddress(texts), inputs.fromAddress("#" + inputs.toAddress(texts))])(
        { ...inputs.BEGINNING, ...given })"""
    texts, address, back = in_script(code, changed)
    assert back == texts
    # A custom model has no name, so the address does not contain one.
    assert {part.partition("=")[0] for part in address.split("&") if part} == {*changed} - {"preset"}


def test_unknown_fields_of_an_address_are_ignored() -> None:
    address = "#preset=Llama-3+70B&strategy=constructor&toString=1&ranks=-8&nonsense"
    code = "((texts) => [texts, inputs.readAll(texts).errors])(inputs.fromAddress(given))"
    texts, errors = in_script(code, address)
    assert (texts["preset"], texts["strategy"]) == ("Llama-3 70B", "FULL_SHARD")
    assert "nonsense" not in texts
    assert list(errors) == ["ranks"]
