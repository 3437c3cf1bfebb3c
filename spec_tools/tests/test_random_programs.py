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
from dataclasses import replace

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
    EDITS,
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

ROOT = pathlib.Path(__file__).parents[2]
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


KINDS_OF_PROGRAMS = (("loops", "2"), ("resumed", "2"), ("races", "2"), ("races", "2x2"), ("calls", "2"), ("apart", "2"))
# Fields, attributes of nodes and arguments of calls with more values than true and false, or that only calls have.
WANTED: dict[str, tuple[object, ...]] = {
    "precision": ("full", "low", "low_summed_full", "full_summed_low", "single"),
    "micro_batches": ((True,), (False, True), (True, True), (True, False, True), (True, False, False, True)),
    "num_replicas": (1, 2),
    "steps": (0, 2, 3),
    "forwards": (1, 2),
    "evaluates": ("", "after", "between", "forgotten"),
    "bomb": ("", "forward", "backward"),
    "saves": ("", "full", "sharded"),
    "steps_by": ("", "foreach", "fused"),
    "stepping": ("", "event", "in_backward"),
    "batches": ("device", "plain", "pinned"),
    "rank": (0, 3),
    "node.times": (1, 2, 3),
    "node.checkpoint": ("", "nonreentrant", "reentrant"),
    "node.returns": ("tensor", "tuple", "dict", "nested"),
    "node.every": (1, 2),
    "node.same_as": (-1, 0, 1),
    "which": ("first", "last", "all"),
    "bang": (2, 3, 4),
    "part": (2, 3, 4),
    "skip": (2, 3, 4),
    "on": (0, 1),
    "damage": ("missing", "extra", "shape", "type", "none", "list"),
    "input": (3, "text", [1.0]),
    "of_model": (True, False),
    "to_none": (True, False),
    "train": (True, False),
    "strict": (True, False),
}
CALLS = (
    *("forward", "backward", "evaluate", "step", "zero_grad", "clip", "edit", "new_optimizer", "mode", "save", "load"),
    *("save_optimizer", "load_optimizer", "wrong", "strange_input", "backward_again", "copy"),
)
HOOKS = ("", "communication", "accumulated", "backward", "plain", "async", "low")
OF_FRONT_END: dict[str, dict[str, tuple[object, ...]]] = {
    "fsdp1": {
        "do": (*CALLS, "enter", "leave", "apply"),
        "node.kind": (*LOOP_LEAVES, *FLAT_KINDS, *CONTAINERS),
        "node.strategy": ("", *PLAIN),
        "strategy": (*PLAIN, *HYBRID),
        "hook": (*HOOKS, "in_place"),
        "edits": ("", *EDITS),
        "resumes": ("", *forms_of("fsdp1")),
        "form": forms_of("fsdp1"),
        "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", ""),
        "by_policy": ("", "custom", "class"),
        "apart": (-1, 0, 1, 2),
        "norm": (1, 2.0, "inf"),
        "how": ("data", "foreach"),
        "what": ("no_sync", "summon"),
        **dict.fromkeys(("writeback", "rank0_only", "offload_to_cpu", "with_grads"), (True, False)),
        "inner": (True,),
    },
    "fully_shard": {
        "do": (
            *CALLS,
            *["generate", "convert", "sync", "keep", "keep_after_backward", "unshard", "wait", "reshard", "prefetch"],
        ),
        "node.kind": (*LOOP_LEAVES[:-1], *KINDS, *CONTAINERS),
        "strategy": (*PLAIN, *HYBRID),
        "hook": HOOKS,
        "edits": ("", *EDITS[:-1]),
        "resumes": ("", *forms_of("fully_shard")),
        "form": forms_of("fully_shard"),
        "dtype": ("", "double", "float"),
        "how": ("data", "foreach", "method", "assign"),
        "when": ("forward", "backward"),
        "among": (0, 1, 2),
        "ahead": (0, 1, 2),
        "by_hand": ("", *BY_HAND),
        "switch": SWITCHES,
        **dict.fromkeys(("later", "recurse"), (True, False)),
    },
}
# The options of one front end only.
OF_ONE = {
    "fsdp1": {"forward_prefetch", "limits", "originals", "by_mesh", "clips", "full_in_eval"},
    "fully_shard": {"pins", "frees", "late", "sums_late", "goes_on", "resets"},
}


def features(d: Description) -> Iterator[tuple[str, object]]:
    """The features of a program, by the names in `WANTED`."""
    yield from ((name, value) for name, value in vars(d).items() if name not in ("model", "calls"))
    yield from (("switch", switch) for switch in d.switches)
    for node, _ in walk(d.model):
        yield from ((f"node.{name}", value) for name, value in vars(node).items() if name != "children")
    for call in d.calls:
        yield from call.items()


@pytest.mark.parametrize("api", OF_FRONT_END)
def test_every_feature_is_drawn(api: str) -> None:
    programs = [d for kind, shape in KINDS_OF_PROGRAMS for d in drawn(kind, 250, 0, api, shape)]
    seen = {(name, repr(value)) for program in programs for name, value in features(program)}
    others = set.union(*(names for front_end, names in OF_ONE.items() if front_end != api))
    switches = {name: (True, False) for name, value in vars(Description()).items() if isinstance(value, bool)}
    switches |= {f"node.{name}": (True, False) for name, value in vars(Node()).items() if isinstance(value, bool)}
    wanted = {name: values for name, values in switches.items() if name not in others} | WANTED | OF_FRONT_END[api]
    assert {(name, repr(value)) for name, values in wanted.items() for value in values} - seen == set()
    assert any(d.ties for d in programs)
    assert any(isinstance(call.get("skip"), list) for d in programs for call in d.calls), "other parts on each rank"


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
