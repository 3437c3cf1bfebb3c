"""The generator: it draws every option, its reference is right, and it finds, reduces and replays an error.

A run without findings is only meaningful if errors can be found. So one of the front ends, ``careless``, contains one.
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
    CONTAINERS,
    Description,
    Node,
    from_json,
    legal,
    num_uses,
    to_json,
    walk,
)
from spec_tests.random_programs.draw import FLAT_KINDS, KINDS, LOOP_LEAVES, drawn, loops
from spec_tests.random_programs.judge import failure_of, judged, neighbours, simplest
from spec_tests.random_programs.modules import batch, loss_of, output_of, plain_model
from spec_tests.random_programs.reference import Reference

ROOT = pathlib.Path(__file__).parents[2]
quick = settings(max_examples=15, deadline=None, derandomize=True, database=None)


def has(d: Description, kind: str, **fields: object) -> bool:
    """Whether a description contains such a node."""
    return any(
        node.kind == kind and all(getattr(node, name) == value for name, value in fields.items())
        for node, _ in walk(d.model)
    )


@pytest.mark.parametrize("api", ["wrapped", "fully_shard"])
def test_drawn_programs_are_legal_and_equal_after_conversion_to_json(api: str) -> None:
    for d in drawn("loops", 20, 0, api, "4"):
        assert from_json(to_json(d)) == d
        assert legal(d) == d


@pytest.mark.pure
@quick
@given(loops("2", "wrapped"))
def test_each_reduced_program_is_legal_and_shorter(description: Description) -> None:
    for neighbour in neighbours(description):
        assert legal(neighbour) == neighbour
        assert len(to_json(neighbour)) < len(to_json(description))


@pytest.mark.pure
@quick
@given(loops("2", "wrapped"))
def test_the_reference_trains_as_one_process_does_on_the_concatenated_batch(description: Description) -> None:
    """The reference computes rank by rank. Here the same gradient comes from one backward of one large batch."""
    d = replace(description, precision="full", micro_batches=(True,), forwards=1, clears=True)
    if any(node.kind == "one_sided" or node.checkpoint == "reentrant" for node, _ in walk(d.model)):
        return  # these use the batch as a whole, or raise without a gradient
    reference, model = Reference(d, 0), plain_model(d)
    reference.forward({"batch": 0}, range(d.num_ranks))
    losses = [float(of_rank[0].detach()) for of_rank in reference.pending]
    reference.backward({"which": "all"}, range(d.num_ranks))
    inputs, tokens = zip(*(batch(d, 0, rank) for rank in range(d.num_ranks)), strict=True)
    loss = loss_of([output_of(d.model, model, (torch.cat(inputs), torch.cat(tokens)))])
    assert float(loss.detach()) == pytest.approx(sum(losses) / d.num_ranks, rel=1e-5)
    if loss.requires_grad:
        loss.backward()
    for (name, ours), expected in zip(reference.model.named_parameters(), model.parameters(), strict=True):
        mine = torch.zeros_like(ours) if ours.grad is None else ours.grad
        theirs = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.pure
def test_same_seed_draws_the_same_programs_and_another_seed_draws_others() -> None:
    first, again, others = (drawn("loops", 20, seed, "wrapped") for seed in (1, 1, 2))
    assert first == again
    assert first != others


# Options that a front end does not have.
NOT_OFFERED = {
    "wrapped": {"pins", "among", "ahead", "frees", "late", "sums_late", "goes_on", "resets", "by_hand", "switches"},
    "fully_shard": {"forward_prefetch", "backward_prefetch", "limits", "originals", "by_mesh", "by_policy", "clips"}
    | {"full_in_eval", "apart", "strategy of a node"},
}
SHAPES = (("loops", "2"), ("resumed", "2"), ("races", "2"), ("races", "2x2"), ("calls", "2"), ("apart", "2"))


@pytest.mark.parametrize("api", NOT_OFFERED)
def test_each_option_is_drawn_with_several_values(api: str) -> None:
    programs = [d for kind, shape in SHAPES for d in drawn(kind, 120, 0, api, shape)]
    seen: dict[str, set[str]] = {}
    for d in programs:
        for name, value in vars(d).items():
            seen.setdefault(name, set()).add(repr(value))
        for node, _ in walk(d.model):
            for name, value in vars(node).items():
                seen.setdefault(f"{name} of a node", set()).add(repr(value))
    assert {name for name, values in seen.items() if len(values) == 1} == {"api"} | NOT_OFFERED[api]
    kinds = {*LOOP_LEAVES, *CONTAINERS, *(FLAT_KINDS if api == "wrapped" else KINDS)}
    assert kinds - {"one_sided"} <= {node.kind for d in programs for node, _ in walk(d.model)}


@pytest.mark.pure
def test_uses_are_counted_through_calls_ties_and_shared_modules() -> None:
    leaf = Node("linear", unit=True)
    chain = Node("chain", times=2, children=(replace(leaf, times=3),))
    assert num_uses(Description(Node("chain", children=(chain,)))) == 6
    assert num_uses(Description(Node("chain", children=(chain,)), forwards=2)) == 12
    shared = Node("chain", children=(leaf, Node("linear", same_as=0), Node("norm")))
    assert num_uses(Description(shared)) == 2
    tied = Node("chain", children=(Node("linear"), Node("linear")))
    assert num_uses(Description(tied, ties=((0, 1),))) == 2


@pytest.mark.pure
def test_illegal_description_becomes_legal() -> None:
    two_units = Node("chain", children=(Node("linear", unit=True), Node("linear")))
    assert legal(Description(two_units, ties=((0, 1),))).ties == ()
    mixed = Node("chain", children=(Node("linear", frozen=True), Node("norm")))
    assert all(child.frozen for child in legal(Description(mixed)).model.children)
    assert legal(Description(mixed, originals=True)).model == mixed
    assert legal(Description(micro_batches=(True, False))).micro_batches == (True, True)


@pytest.mark.pure
def test_reduction_removes_all_unnecessary_parts() -> None:
    programs = drawn("loops", 60, 3, "wrapped")
    large = next(d for d in programs if has(d, "norm", unit=True) and len(to_json(d)) > 400)
    small = simplest(large, lambda several: next((d for d in several if has(d, "norm", unit=True)), None))
    assert to_json(small) == '{"model":{"kind":"chain","children":[{"kind":"norm","unit":true}]}}'


@pytest.mark.ranks
@pytest.mark.cpu
@pytest.mark.spec("FUZZ-08")
def test_an_error_is_found_reduced_and_replayed_by_the_printed_command() -> None:
    """The careless front end halves the gradient of an embedding that is used twice, so each step is a finding."""
    embedding = Node("embedding", size=5, unit=True, times=2)
    branches = Node("sum", children=(embedding, Node("norm", unit=True)))
    wrong = Description(
        Node("chain", children=(Node("mlp", unit=True), branches)),
        api="careless",
        strategy="SHARD_GRAD_OP",
        micro_batches=(False, True),
        evaluates="after",
    )
    right = [replace(d, api="careless") for d in drawn("loops", 5, 0, "wrapped") if not has(d, "embedding", times=2)]
    report = failure_of([*right, wrong])
    assert report is not None
    assert "differs: gradient of" in report
    _, _, module, *arguments = shlex.split(report.splitlines()[-1])
    assert from_json(arguments[-1]).model == Node("chain", children=(Node("embedding", unit=True, times=2),))
    again = run_module(module, *arguments, folder=ROOT, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert again.returncode == 1, again.stderr
    assert again.stdout.strip() in report


@pytest.mark.ranks
@pytest.mark.cpu
def test_command_runs_programs_and_prints_their_number() -> None:
    arguments = ("calls", "--minutes", "0", "--seed", "1")
    ended = run_module("spec_tests.random_programs", *arguments, folder=ROOT, environment=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    assert "25 programs in all, 0 batches with a finding" in ended.stdout


@pytest.mark.ranks
@pytest.mark.cpu
def test_wrapper_of_torch_passes_the_same_programs() -> None:
    """The reference agrees with torch's own FSDP."""
    model = Node("chain", children=(Node("linear", unit=True), Node("mlp", unit=True, times=2), Node("norm")))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        d = Description(model, api="torch_wrapped", strategy=strategy, micro_batches=(False, True), momentum=True)
        (verdict,) = judged([d])
        assert verdict.found is None
