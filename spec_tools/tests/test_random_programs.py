"""The tools of ``spec_tests/random_programs``: descriptions, the reference, shrinking and replaying.

A hunt without findings is only meaningful if the hunt can find errors. So one of its API variants, ``careless``,
contains an error.
"""

from __future__ import annotations

import os
import pathlib
import shlex
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from spec_tests.harness.programs import run_module
from spec_tests.random_programs.description import (
    Description,
    Node,
    from_json,
    legal,
    to_json,
    walk,
)
from spec_tests.random_programs.draw import (
    drawn,
    loops,
)
from spec_tests.random_programs.judge import hunt, neighbours, replay_line, simplest
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
@given(loops("4", "fsdp1") | loops("4", "fully_shard"))
def test_legal_description_is_unchanged(description: Description) -> None:
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
    _, _, module, *arguments = shlex.split(line)
    again = run_module(module, *arguments, folder=ROOT, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert again.returncode == 1, again.stderr
    # Exactly the same numbers.
    assert [text for text in report.splitlines() if text.startswith("here")] == [
        text for text in again.stdout.splitlines() if text.startswith("here")
    ]
