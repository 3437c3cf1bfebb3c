"""The tools of ``spec_tests/random_programs``: descriptions, the reference, shrinking and replaying.

A hunt without findings is only meaningful if the hunt can find errors. So one of its API variants, ``careless``,
contains an error.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from spec_tests.harness.programs import run_module
from spec_tests.random_programs.description import (
    CONTAINERS,
    Description,
    Node,
    forms_of,
    from_json,
    legal,
    num_uses,
    to_json,
    walk,
)
from spec_tests.random_programs.draw import (
    BY_HAND,
    FLAT_KINDS,
    HYBRID,
    KINDS,
    LOOP_LEAVES,
    PLAIN,
    SWITCHES,
    drawn,
    loops,
)
from spec_tests.random_programs.judge import first_failure, hunt, judged, neighbours, replay_line, simplest
from spec_tests.random_programs.modules import batch, loss_of, output_of, plain_model
from spec_tests.random_programs.reference import Reference

ROOT = pathlib.Path(__file__).parents[1]
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def has(kind: str, **fields: object) -> object:
    """A predicate on a description: whether it contains such a node."""

    def ask(candidates: list[Description]) -> Description | None:
        for d in candidates:
            for node, _ in walk(d.model):
                if node.kind == kind and all(getattr(node, name) == value for name, value in fields.items()):
                    return d
        return None

    return ask


@quick
@given(loops("2", "fsdp1"))
def test_description_is_unchanged_after_conversion_to_json(description: Description) -> None:
    assert from_json(to_json(description)) == description


@quick
@given(loops("4", "fsdp1"))
def test_legal_description_is_unchanged(description: Description) -> None:
    assert legal(description) == description


@quick
@given(loops("4", "fully_shard"))
def test_legal_description_for_other_api_is_unchanged(description: Description) -> None:
    assert legal(description) == description


@quick
@given(loops("2", "fsdp1"))
def test_shrunk_description_is_legal_and_shorter(description: Description) -> None:
    for neighbour in neighbours(description):
        assert legal(neighbour) == neighbour
        assert len(to_json(neighbour)) < len(to_json(description))


@quick
@given(loops("2", "fsdp1"))
def test_the_reference_trains_as_one_process_does_on_the_concatenated_batch(description: Description) -> None:
    """The reference computes rank by rank. Here the same gradient comes from one backward of one large batch."""
    d = replace(description, precision="full", micro_batches=(True,), forwards=1, clears=True)
    if any(node.kind == "one_sided" or node.checkpoint == "reentrant" for node, _ in walk(d.model)):
        return  # these use the batch as a whole, or raise without a gradient
    reference, model = Reference(d, 0), plain_model(d)
    reference.forward({"batch": 0}, range(d.num_ranks))
    losses = [float(of_rank[0].detach()) for of_rank in reference.pending]
    reference.backward({"which": "all"}, range(d.num_ranks))
    parts = [batch(d, 0, rank) for rank in range(d.num_ranks)]
    loss = loss_of([output_of(d.model, model, (torch.cat([x for x, _ in parts]), torch.cat([t for _, t in parts])))])
    assert float(loss.detach()) == pytest.approx(sum(losses) / d.num_ranks, rel=1e-5)
    if loss.requires_grad:
        loss.backward()
    for (name, ours), expected in zip(reference.model.named_parameters(), model.parameters(), strict=True):
        mine = torch.zeros_like(ours) if ours.grad is None else ours.grad
        theirs = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_same_seed_draws_the_same_cases_and_another_seed_draws_others() -> None:
    first, again, others = (drawn("loops", 20, seed, "fsdp1") for seed in (1, 1, 2))
    assert first == again
    assert first != others


LOOPS = {
    "strategy": (*PLAIN, *HYBRID),
    "precision": ("full", "low", "low_summed_full", "full_summed_low"),
    "micro_batches": (
        *((True,), (False, True), (True, True), (False, False, True)),
        *((True, False, True), (False, True, False, True), (True, False, False, True)),
    ),
    "offload": (True, False),
    "num_replicas": (1, 2),
    "ties": (True,),
    "steps": (2, 3),
    "forwards": (1, 2),
    "momentum": (True, False),
    "clears": (True, False),
    "evaluates": ("", "after", "between", "forgotten"),
    "bomb": ("", "forward", "backward"),
    "edits": ("", "write"),
    "saves": ("", "full"),
    "tracks_input": (True, False),
    "node.unit": (True, False),
    "node.frozen": (True, False),
    "node.times": (1, 2, 3),
    "node.checkpoint": ("", "nonreentrant", "reentrant"),
    "node.returns": ("tensor", "tuple", "dict", "nested"),
    "node.keywords": (True, False),
    "node.every": (1, 2),
    "node.same_as": (-1, 0, 1),
}
LOOPS_OF_WRAPPER = {
    "originals": (True, False),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", ""),
    "forward_prefetch": (True, False),
    "limits": (True, False),
    "by_policy": ("", "custom"),
    "clips": (True, False),
    "apart": (-1, 0, 1, 2),
    "node.strategy": ("", *PLAIN),
}
RESUMED = {"adam": (True, False), "hook": ("communication", "accumulated", "backward")}
RACES = {
    "rank": (0, 1),
    "batches": ("device", "plain", "pinned"),
    "reads": (True, False),
    "separate": (True, False),
    "stepping": ("", "event", "in_backward"),
    "adam": (True, False),
    "scales": (True, False),
    "hook": ("", "plain", "async", "low"),
    "edits": ("", "in_place", "new_data", "write", "read", "read_on_cpu"),
    "saves": ("", "full", "sharded"),
    "elsewhere": (True, False),
}
RACES_OF_FUNCTION = {
    "pins": (True, False),
    "among": (0, 1, 2),
    "ahead": (0, 1, 2),
    "by_hand": ("", *BY_HAND),
    "switch": SWITCHES,
    "late": (True, False),
    "goes_on": (True, False),
    "resets": (True, False),
}
CALLS: dict[str, tuple[Any, ...]] = {
    "do": (
        "forward",
        "backward",
        "evaluate",
        "step",
        "zero_grad",
        "clip",
        "edit",
        "new_optimizer",
        "mode",
        "save",
        "load",
        "save_optimizer",
        "load_optimizer",
        "wrong",
        "strange_input",
        "backward_again",
        "copy",
    ),
    "steps_by": ("", "foreach", "fused"),
    "adam": (True, False),
    "precision": ("full", "single"),
    "offload": (True, False),
    "num_replicas": (1, 2),
    "node.times": (1, 2),
    "call.which": ("first", "last", "all"),
    "call.bang": (2, 3, 4),
    "call.part": (2, 3, 4),
    "call.skip": (2, 3, 4),
    "call.how": ("data", "foreach"),
    "call.of_model": (True, False),
    "call.to_none": (True, False),
    "call.train": (True, False),
    "call.strict": (True, False),
    "call.damage": ("missing", "extra", "shape", "type", "none", "list"),
    "call.input": (3, "text"),
}
CALLS_OF_WRAPPER: dict[str, tuple[Any, ...]] = {
    "do": ("enter", "leave", "apply"),
    "strategy": (*PLAIN, *HYBRID),
    "originals": (True, False),
    "full_in_eval": (True, False),
    "hook": ("", "in_place"),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", ""),
    "forward_prefetch": (True, False),
    "by_mesh": (True,),
    "node.kind": FLAT_KINDS,
    "call.what": ("no_sync", "summon"),
    "call.writeback": (True, False),
    "call.rank0_only": (True, False),
    "call.offload_to_cpu": (True, False),
    "call.with_grads": (True, False),
    "call.inner": (True,),
    "call.norm": (1, 2.0, "inf"),
    "call.form": ("full", "rank0", "sharded", "dtensor", "local"),
}
CALLS_OF_FUNCTION: dict[str, tuple[Any, ...]] = {
    "do": ("generate", "convert", "sync", "keep", "keep_after_backward", "unshard", "wait", "reshard", "prefetch"),
    "dtype": ("double", "float"),
    "frees": (True, False),
    "node.kind": KINDS,
    "call.dtype": ("double", "float"),
    "call.how": ("method", "assign"),
    "call.later": (True, False),
    "call.recurse": (True, False),
    "call.when": ("forward", "backward"),
    "call.form": ("full", "rank0", "sharded", "own"),
}
# By kind and front end: what must be drawn.
DRAWN: dict[tuple[str, str, str], dict[str, tuple[object, ...]]] = {
    ("loops", "fsdp1", "2"): LOOPS | LOOPS_OF_WRAPPER | {"node.kind": (*LOOP_LEAVES, *CONTAINERS)},
    ("loops", "fully_shard", "2"): LOOPS | {"node.kind": (*LOOP_LEAVES[:-1], *CONTAINERS)},
    ("resumed", "fsdp1", "2"): RESUMED | {"resumes": forms_of("fsdp1")},
    ("resumed", "fully_shard", "2"): RESUMED | {"resumes": forms_of("fully_shard")},
    ("races", "fsdp1", "2"): RACES,
    ("races", "fully_shard", "2"): RACES | RACES_OF_FUNCTION,
    ("races", "fsdp1", "2x2"): {"edits": ("gradients",), "strategy": HYBRID},
    ("races", "fully_shard", "2x2"): {"sums_late": (True, False)},
    ("calls", "fsdp1", "2"): CALLS | CALLS_OF_WRAPPER | {"do": CALLS["do"] + CALLS_OF_WRAPPER["do"]},
    ("calls", "fully_shard", "2"): CALLS
    | CALLS_OF_FUNCTION
    | {"do": CALLS["do"] + CALLS_OF_FUNCTION["do"], "call.how": ("data", "foreach", "method", "assign")},
    ("apart", "fsdp1", "2"): {"call.on": (0, 1), "skips differ": (True,)},
    ("apart", "fully_shard", "2"): {"call.on": (0, 1), "skips differ": (True,)},
}


def features(d: Description) -> Iterator[tuple[str, object]]:
    """The features of a program, by the names in `DRAWN`."""
    yield from (
        (field.name, getattr(d, field.name)) for field in fields(d) if field.name not in ("model", "ties", "calls")
    )
    yield "ties", bool(d.ties)
    yield from (("switch", switch) for switch in d.switches)
    for node, _ in walk(d.model):
        yield from (
            (f"node.{field.name}", getattr(node, field.name)) for field in fields(node) if field.name != "children"
        )
    for call in d.calls:
        yield "do", call["do"]
        yield from ((f"call.{name}", value) for name, value in call.items())
        yield "skips differ", isinstance(call.get("skip"), list)


@pytest.mark.parametrize(("kind", "api", "shape"), DRAWN)
def test_every_feature_of_a_kind_of_program_is_drawn(kind: str, api: str, shape: str) -> None:
    programs = drawn(kind, 250, 0, api, shape)
    seen = {(name, repr(value)) for program in programs for name, value in features(program)}
    wanted = {(name, repr(value)) for name, values in DRAWN[kind, api, shape].items() for value in values}
    assert wanted - seen == set()


def test_uses_are_counted_through_calls_ties_and_shared_modules() -> None:
    leaf = Node("linear", unit=True)
    chain = Node("chain", times=2, children=(replace(leaf, times=3),))
    assert num_uses(Description(Node("chain", children=(chain,)))) == 6
    assert num_uses(Description(Node("chain", children=(chain,)), forwards=2)) == 12
    shared = Node("chain", children=(leaf, Node("linear", same_as=0), Node("norm")))
    assert num_uses(Description(shared)) == 2
    tied = Node("chain", children=(Node("linear"), Node("linear")))
    assert num_uses(Description(tied, ties=((0, 1),))) == 2


def test_illegal_description_becomes_legal() -> None:
    two_units = Node("chain", children=(Node("linear", unit=True), Node("linear")))
    assert legal(Description(two_units, ties=((0, 1),))).ties == ()
    mixed = Node("chain", children=(Node("linear", frozen=True), Node("norm")))
    assert all(child.frozen for child in legal(Description(mixed)).model.children)
    assert legal(Description(mixed, originals=True)).model == mixed
    assert legal(Description(micro_batches=(True, False))).micro_batches == (True, True)


def test_shrinking_removes_all_unnecessary_parts() -> None:
    large = next(d for d in drawn("loops", 60, 3, "fsdp1") if has("norm", unit=True)([d]) and len(to_json(d)) > 400)
    small = simplest(large, has("norm", unit=True))
    assert to_json(small) == '{"model":{"kind":"chain","children":[{"kind":"norm","unit":true}]}}'


CARELESS = Description(
    Node(
        "chain",
        children=(
            Node("mlp", unit=True),
            Node("sum", children=(Node("embedding", size=5, unit=True, times=2), Node("norm", unit=True))),
        ),
    ),
    api="careless",
    strategy="SHARD_GRAD_OP",
    micro_batches=(False, True),
    evaluates="after",
)


@pytest.mark.ranks
def test_hunt_finds_shrinks_and_replays_an_error() -> None:
    innocent = [replace(d, api="careless") for d in drawn("loops", 5, 0, "fsdp1")]
    innocent = [d for d in innocent if has("embedding", times=2)([d]) is None]
    report = hunt([*innocent, CARELESS])
    assert report is not None
    line = report.splitlines()[-1]
    small = from_json(shlex.split(line)[-1])
    assert small.model == Node("chain", children=(Node("embedding", unit=True, times=2),))
    assert line == replay_line(small)
    # The command below checks that the line works as it is.
    _, _, module, *arguments = shlex.split(line)
    again = run_module(module, *arguments, folder=ROOT, environment=_surroundings())
    assert again.returncode == 1, again.stderr
    # Exactly the same numbers.
    assert [text for text in report.splitlines() if text.startswith("here")] == [
        text for text in again.stdout.splitlines() if text.startswith("here")
    ]


def _surroundings() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.ranks
def test_replay_of_correct_case_succeeds() -> None:
    line = shlex.split(replay_line(replace(CARELESS, api="fsdp1")))
    again = subprocess.run(
        [sys.executable, *line[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120, env=_surroundings()
    )
    assert (again.returncode, again.stdout.strip()) == (0, "the ranks agree with one process"), again.stderr


@pytest.mark.ranks
def test_wrapper_of_torch_passes_the_same_property_tests() -> None:
    """The oracle agrees with torch's own FSDP."""
    chosen = [d for d in drawn("loops", 12, 5, "fsdp1") if not d.offload and not d.clips]
    assert [verdict.found for verdict in judged(chosen)] == [None] * len(chosen)
    model = Node("chain", children=(Node("linear", unit=True), Node("mlp", unit=True, times=2), Node("norm")))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        plain = Description(model, api="torch_fsdp1", strategy=strategy, micro_batches=(False, True), momentum=True)
        assert first_failure([plain]) is None
