"""The tools of ``spec_tests/properties``: descriptions, the oracle, shrinking and replaying.

A hunt without findings is only meaningful if the hunt can find errors. So one of its API variants, ``careless``,
contains an error.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from spec_tests.harness.programs import run_module
from spec_tests.properties.build import batch, output_of, plain_model
from spec_tests.properties.description import Description, Node, from_json, legal, num_uses, to_json, walk
from spec_tests.properties.draw import descriptions, drawn
from spec_tests.properties.hunt import findings_of, first_failure, hunt, neighbours, replay_line, simplest
from spec_tests.properties.oracle import Oracle, loss_of

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
@given(descriptions(2, "fsdp1"))
def test_description_is_unchanged_after_conversion_to_json(description: Description) -> None:
    assert from_json(to_json(description)) == description


@quick
@given(descriptions(4, "fsdp1"))
def test_legal_description_is_unchanged(description: Description) -> None:
    assert legal(description) == description


@quick
@given(descriptions(4, "fully_shard"))
def test_legal_description_for_other_api_is_unchanged(description: Description) -> None:
    assert legal(description) == description


@quick
@given(descriptions(2, "fsdp1"))
def test_shrunk_description_is_legal_and_shorter(description: Description) -> None:
    for neighbour in neighbours(description):
        assert legal(neighbour) == neighbour
        assert len(to_json(neighbour)) < len(to_json(description))


@quick
@given(descriptions(2, "fsdp1"))
def test_the_oracle_trains_as_one_process_does_on_the_concatenated_batch(description: Description) -> None:
    """The oracle computes rank by rank. Here the same gradient comes from one backward of one large batch."""
    d = replace(description, precision="full", micro_batches=(True,), forwards=1, clears=True)
    if any(node.kind == "one_sided" or node.checkpoint == "reentrant" for node, _ in walk(d.model)):
        return  # these use the batch as a whole, or raise without a gradient
    oracle, model = Oracle(d), plain_model(d)
    losses = oracle.backward(0)
    parts = [batch(d, 0, 0, rank) for rank in range(d.num_ranks)]
    loss = loss_of([output_of(d.model, model, (torch.cat([x for x, _ in parts]), torch.cat([t for _, t in parts])))])
    assert float(loss.detach()) == pytest.approx(sum(of_rank[0] for of_rank in losses) / d.num_ranks, rel=1e-5)
    if loss.requires_grad:
        loss.backward()
    for (name, ours), expected in zip(oracle.model.named_parameters(), model.parameters(), strict=True):
        mine = torch.zeros_like(ours) if ours.grad is None else ours.grad
        theirs = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_same_seed_draws_the_same_cases_and_another_seed_draws_others() -> None:
    first, again, others = (drawn(20, seed, 2, "fsdp1") for seed in (1, 1, 2))
    assert first == again
    assert first != others


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
    large = next(d for d in drawn(60, 3, 2, "fsdp1") if has("norm", unit=True)([d]) and len(to_json(d)) > 400)
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
    innocent = [replace(d, api="careless") for d in drawn(5, 0, 2, "fsdp1")]
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
    chosen = [d for d in drawn(12, 5, 2, "fsdp1") if not d.offload and not d.clips]
    assert findings_of([replace(d, api="fsdp1") for d in chosen]) == [None] * len(chosen)
    model = Node("chain", children=(Node("linear", unit=True), Node("mlp", unit=True, times=2), Node("norm")))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        plain = Description(model, api="torch_fsdp1", strategy=strategy, micro_batches=(False, True), momentum=True)
        assert first_failure([plain]) is None
