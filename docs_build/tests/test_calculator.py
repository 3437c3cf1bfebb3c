"""The page's calculator computes the same as ``minifsdp_tools.cost`` on a grid of jobs, and refuses invalid input."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from dataclasses import asdict, replace
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
        {"reshards_to": 2, "num_shards": 4},
        {"scratch": 4},
        {"buffers": 100, "buffer": torch.float16},
        {"activations": 12345},
        {"optimizer": 0},
        {"num_shards": 1},
    ]
    for change, strategy in itertools.product(changes, ["FULL_SHARD", "SHARD_GRAD_OP"]):
        found.append(replace(base, **{**MODELS[1], "strategy": strategy, **change}))
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
    names = {"c": "cost", "models": "models", "inputs": "inputs"}
    files = {name: json.dumps(str(SCRIPTS / f"calculator-{file}.js")) for name, file in names.items()}
    loads = "".join(f"const {name} = require({file});" for name, file in files.items())
    program = f"{loads} const given = JSON.parse(require('fs').readFileSync(0));{code}"
    done = subprocess.run([node, "-e", program], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("COST-01", "COST-02", "COST-03", "COST-06", "COST-07", "COST-08")
def test_page_and_package_give_the_same_costs_for_every_job() -> None:
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
def test_model_description_is_parsed_from_lines(text: str) -> None:
    found = in_script("console.log(JSON.stringify(models.parseModel(given)))", text)
    expected = {
        "4 * 1000": {"units": [[[1000]]] * 4, "root": []},
        "root: 5x3, 1\n7x5, 3\n2 * 11  # two of them": {
            "units": [[[7, 5], [3]], [[11]], [[11]]],
            "root": [[5, 3], [1]],
        },
    }
    assert found == expected[text]


@pytest.mark.spec("COST-15", "COST-16", "COST-17", "COST-18")
@pytest.mark.parametrize("per_machine", [1, 2, 3, 8])
def test_page_and_package_give_the_same_links_times_and_estimates_for_every_job(per_machine: int) -> None:
    grid, tokens = jobs(), 17
    cluster = Cluster(per_machine, operations=1e5, within=3e3, between=7e2)
    code = """console.log(JSON.stringify(given.jobs.map((job) => {
        const cluster = { perMachine: given.perMachine, operations: 1e5, within: 3e3, between: 7e2 };
        return { links: c.sentByLink(job, given.perMachine), both: [false, true].map((checkpointing) => {
            const count = c.operations(job, 17, checkpointing);
            return [count, c.activationBytes(job, 17, checkpointing), c.stepTime(job, count, cluster)];
        }) };
    })))"""
    theirs = in_script(code, {"jobs": [as_script(job) for job in grid], "perMachine": per_machine})
    for job, found in zip(grid, theirs, strict=True):
        for kind, sent in sent_by_link(job, per_machine).items():
            assert found["links"][kind] == pytest.approx(asdict(sent)), job
        for checkpointing, (count, activations, time) in zip([False, True], found["both"], strict=True):
            assert count == operations(job, tokens, checkpointing=checkpointing), job
            assert activations == pytest.approx(activation_bytes(job, tokens, checkpointing=checkpointing)), job
            assert time == pytest.approx(asdict(step_time(job, count, cluster))), job


# ---- models ---------------------------------------------------------------------------------------------------------


def preset(name: str) -> dict[str, Any]:
    return dict(in_script("console.log(JSON.stringify(models.parseModel(models.PRESETS[given])))", name))


def shapes_of(module: Any) -> list[list[int]]:
    return sorted(list(p.shape) for p in module.parameters(recurse=True))


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "intermediate", "total"),
    [
        ("Llama-3 8B", 32, 4096, 32, 14336, 8_030_261_248),
        ("Llama-3 70B", 80, 8192, 64, 28672, 70_553_706_496),
    ],
)
def test_llama_3_has_its_true_shapes(
    name: str, layers: int, hidden: int, heads: int, intermediate: int, total: int
) -> None:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2,  # all layers are alike
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=intermediate,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = preset(name)
    assert [sorted(unit) for unit in found["units"]] == [shapes_of(model.model.layers[0])] * layers
    assert sorted(found["root"]) == sorted(
        [*shapes_of(model.model.embed_tokens), *shapes_of(model.model.norm), *shapes_of(model.lm_head)]
    )
    # The parameter counts that the publisher gives.
    assert sum(prod(shape) for unit in [*found["units"], found["root"]] for shape in unit) == total


@pytest.mark.needs("transformers")
def test_the_smaller_gpt_has_its_true_shapes() -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    found = preset("GPT, 124 M")
    ours = sorted(sorted(shape) for unit in [*found["units"], found["root"]] for shape in unit)
    # GPT-2 stores its matrices transposed, and the output matrix is tied to the embedding.
    assert ours == sorted(sorted(p.shape) for p in model.parameters())


def test_every_named_model_is_parsed_and_has_its_name() -> None:
    code = """console.log(JSON.stringify(Object.entries(models.PRESETS).map(([name, text]) =>
        [name, models.nameOf(text), models.nameOf(text + ", 1"), models.parseModel(text).units.length])))"""
    for name, known, edited, units in in_script(code, None):
        assert (known, edited) == (name, "")
        assert units > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1"),
        ("4 * ", "line 1"),
        ("7x, 3", "line 1"),
        ("5\n\n# a comment\nseven", "line 4"),
        ("5\n-3", "line 2"),
        ("5\n0 * 4", "line 2: 0 units"),
        ("5\n2 * 0x4", "line 2"),
        ("root: 1.5", "line 1"),
        ("3000 * 4", "line 1: more than 2000 units"),
        ("9999999999x2", "line 1: a dimension of more"),
    ],
)
def test_invalid_model_description_is_refused_with_its_line(text: str, says: str) -> None:
    code = "try { models.parseModel(given); console.log('null') } catch (e) { console.log(JSON.stringify(e.message)) }"
    assert str(in_script(code, text)).startswith(says)


# ---- inputs ---------------------------------------------------------------------------------------------------------

NUMBERS = ["ranks", "machines", "length", "sequences", "batches", "teraflops", "within", "between"]


@pytest.mark.parametrize("wrong", ["", " ", "-1", "0", "abc", "NaN", "Infinity", "1e99"])
@pytest.mark.parametrize("field", NUMBERS)
def test_invalid_number_is_refused_at_its_field(field: str, wrong: str) -> None:
    code = "console.log(JSON.stringify(inputs.readAll({ ...inputs.BEGINNING, ...given }).errors))"
    errors = in_script(code, {field: wrong})
    assert list(errors) == [field]
    assert "needed" in errors[field] or "at most" in errors[field]


def test_only_visible_fields_are_validated() -> None:
    code = "console.log(JSON.stringify(given.map((one) => inputs.readAll({ ...inputs.BEGINNING, ...one }).errors)))"
    broken = {"activations": "-1", "gib": ""}
    hidden, shown, whole, divided = in_script(
        code,
        [
            broken,
            {**broken, "kept": "typed", "memory": "typed"},
            {"ranks": "2.5", "length": "1.5", "within": "2.5"},
            {"ranks": "64", "machines": "5"},
        ],
    )
    assert hidden == {}
    assert list(shown) == ["activations", "gib"]
    assert list(whole) == ["ranks", "length"]
    assert divided == {"machines": "64 ranks do not divide over 5 machines"}


@pytest.mark.parametrize(("typed", "good"), [("0", True), ("0.5", True), ("", False), ("-1", False)])
def test_activations_are_required_but_may_be_zero(typed: str, good: bool) -> None:
    code = (
        "console.log(JSON.stringify(inputs.readAll({ ...inputs.BEGINNING, kept: 'typed', activations: given }).errors))"
    )
    assert in_script(code, typed) == ({} if good else {"activations": "a number is needed, 0 or more"})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"ranks": "64", "machines": "8", "strategy": "HYBRID_SHARD"},
        {"offload": True, "nosync": True, "batches": "4"},
        {"memory": "typed", "gib": "31.5", "kept": "typed", "activations": "2"},
        {"compute": "", "ranks": ""},
        {"lines": "root: 5x3 # ü & = +\n4 * 7", "preset": ""},
    ],
)
def test_address_keeps_all_changed_inputs_and_no_default(changed: dict[str, Any]) -> None:
    code = """const texts = { ...inputs.BEGINNING, ...given }, address = inputs.toAddress(texts);
        console.log(JSON.stringify([texts, address, inputs.fromAddress("#" + address)]))"""
    texts, address, back = in_script(code, changed)
    assert back == texts
    # A custom model has no name, so the address does not contain one.
    assert {part.partition("=")[0] for part in address.split("&") if part} == {*changed} - {"preset"}


def test_address_names_a_model_and_its_unknown_fields_are_ignored() -> None:
    code = """const texts = inputs.fromAddress(given);
        console.log(JSON.stringify([texts.preset, texts.lines === models.PRESETS["Llama-3 70B"], texts.strategy,
            inputs.readAll(texts).errors, Object.keys(texts).length === Object.keys(inputs.FIELDS).length]))"""
    address = "#preset=Llama-3+70B&strategy=constructor&toString=1&ranks=-8&nonsense"
    name, is_its_text, strategy, errors, no_more_fields = in_script(code, address)
    assert (name, is_its_text, strategy, no_more_fields) == ("Llama-3 70B", True, "FULL_SHARD", True)
    assert list(errors) == ["ranks"]


def test_calculator_gives_the_results_of_the_package() -> None:
    """Llama-3 70B on 8 machines: the strategies send similar amounts in total, but not between machines."""
    code = """const { read } = inputs.readAll(inputs.fromAddress("#preset=Llama-3+70B&ranks=64&machines=8"));
        console.log(JSON.stringify([read.model, inputs.answer(read).strategies]))"""
    model, answers = in_script(code, None)
    for found in answers:
        shards, replicas = {"NO_SHARD": (1, 64), "FULL_SHARD": (64, 1), "SHARD_GRAD_OP": (64, 1)}.get(
            found["strategy"], (8, 8)
        )
        job = Job(
            **model,
            strategy=found["strategy"],
            num_shards=shards,
            num_replicas=replicas,
            per_parameter=True,
            compute=torch.bfloat16,
        )
        job = replace(job, activations=activation_bytes(job, 4096, checkpointing=True))
        links = sent_by_link(job, 8).values()
        assert found["peak"] == pytest.approx(cost_of(job).peak)
        assert found["left"] == pytest.approx(80 * 2**30 - cost_of(job).peak)
        assert (found["within"], found["between"]) == pytest.approx(
            (sum(sent.within for sent in links), sum(sent.between for sent in links))
        )
        cluster = Cluster(8, operations=989e12, within=450e9, between=50e9)
        time = step_time(job, operations(job, 4096, checkpointing=True), cluster)
        assert found["time"] == pytest.approx(asdict(time))
    by_name = {found["strategy"]: found for found in answers}
    full, hybrid = by_name["FULL_SHARD"], by_name["HYBRID_SHARD"]
    assert full["within"] + full["between"] == pytest.approx(412.6e9, rel=1e-3)
    assert hybrid["within"] + hybrid["between"] == pytest.approx(397.6e9, rel=1e-3)
    assert hybrid["between"] < 0.61 * full["between"]
