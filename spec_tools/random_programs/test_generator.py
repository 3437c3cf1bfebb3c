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

from spec_tests.harness.programs import run_module
from spec_tests.random_programs import description as programs
from spec_tests.random_programs import draw, judge, modules, reference
from spec_tests.random_programs.description import Description, Node

ROOT = pathlib.Path(__file__).parents[2]
apis = pytest.mark.parametrize("api", ["wrapped", "fully_shard"])


@apis
def test_drawn_programs_and_their_reductions_are_legal_and_equal_after_conversion_to_json(api: str) -> None:
    drawn = draw.drawn("loops", 20, 1, api, "4")
    for d in drawn:
        assert programs.from_json(programs.to_json(d)) == d
        assert programs.legal(d) == d
    for neighbour in judge.neighbours(drawn[-1]):
        assert programs.legal(neighbour) == neighbour
        assert len(programs.to_json(neighbour)) < len(programs.to_json(drawn[-1]))
    assert draw.drawn("loops", 20, 1, api, "4") == drawn, "the same seed draws the same programs"
    assert draw.drawn("loops", 20, 2, api, "4") != drawn, "another seed draws others"


@pytest.mark.pure
def test_the_reference_trains_as_one_process_does_on_the_concatenated_batch() -> None:
    """The reference computes rank by rank. Here the same gradient comes from one backward of one large batch."""
    for drawn in draw.drawn("loops", 20, 0, "wrapped"):
        d = replace(drawn, precision="full", micro_batches=(True,), forwards=1, clears=True, hook="")
        if any(node.kind == "one_sided" or node.checkpoint == "reentrant" for node, _ in programs.walk(d.model)):
            continue  # these use the batch as a whole, or raise without a gradient
        reduced, plain = reference.Reference(d, 0), modules.plain_model(d)
        reduced.forward({"batch": 0})
        losses = [float(of_rank[0].detach()) for of_rank in reduced.pending]
        reduced.backward({"which": "all"})
        inputs, tokens = zip(*(modules.batch(d, 0, rank) for rank in range(d.num_ranks)), strict=True)
        loss = modules.loss_of([modules.output_of(d.model, plain, (torch.cat(inputs), torch.cat(tokens)))])
        assert float(loss.detach()) == pytest.approx(sum(losses) / d.num_ranks, rel=1e-5)
        if loss.requires_grad:
            loss.backward()
        gradients, expected = (
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
            for model in (reduced.model, plain)
        )
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


# Options that are drawn with one value.
FIXED = {"wrapped": {"api"}, "fully_shard": {"api", "clips", "full_in_eval", "apart", "strategy of a node"}}
SHAPES = (("loops", "2"), ("races", "2"), ("races", "2x2"), ("calls", "2"), ("apart", "2"))


@apis
def test_each_option_is_drawn_with_several_values(api: str) -> None:
    drawn = [d for kind, shape in SHAPES for d in draw.drawn(kind, 120, 0, api, shape)]
    seen: dict[str, set[str]] = {}
    for d in drawn:
        for name, value in vars(d).items():
            seen.setdefault(name, set()).add(repr(value))
        for node, _ in programs.walk(d.model):
            for name, value in vars(node).items():
                seen.setdefault(f"{name} of a node", set()).add(repr(value))
    assert {name for name, values in seen.items() if len(values) == 1} == FIXED[api]
    kinds = {*draw.LOOP_LEAVES, *programs.CONTAINERS, *(draw.FLAT_KINDS if api == "wrapped" else draw.KINDS)}
    assert kinds - {"one_sided"} <= {node.kind for d in drawn for node, _ in programs.walk(d.model)}


@pytest.mark.pure
def test_uses_are_counted_through_calls_ties_and_shared_modules() -> None:
    leaf = Node("linear", unit=True)
    chain = Node("chain", times=2, children=(replace(leaf, times=3),))
    assert programs.num_uses(Description(Node("chain", children=(chain,)))) == 6
    assert programs.num_uses(Description(Node("chain", children=(chain,)), forwards=2)) == 12
    shared = Node("chain", children=(leaf, Node("linear", same_as=0), Node("norm")))
    assert programs.num_uses(Description(shared)) == 2
    tied = Node("chain", children=(Node("linear"), Node("linear")))
    assert programs.num_uses(Description(tied, ties=1)) == 2
    in_two_units = Node("chain", children=(leaf, Node("linear")))
    assert programs.num_uses(Description(in_two_units, ties=1)) == 1


@pytest.mark.pure
def test_illegal_description_becomes_legal() -> None:
    mixed = Node("chain", children=(Node("linear", frozen=True), Node("norm")))
    assert all(child.frozen for child in programs.legal(Description(mixed)).model.children)
    assert programs.legal(Description(mixed, originals=True)).model == mixed
    assert programs.legal(Description(micro_batches=(True, False))).micro_batches == (True, True)


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
    right = replace(wrong, model=Node("chain", children=(Node("mlp", unit=True), Node("norm", unit=True))))
    report = judge.failure_of([right, wrong])
    assert report is not None
    assert "differs: gradient of" in report
    _, _, module, *arguments = shlex.split(report.splitlines()[-1])
    small = Node("chain", children=(Node("embedding", unit=True, times=2),))
    assert programs.from_json(arguments[-1]) == Description(small, api="careless")
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
        (verdict,) = judge.judged([d])
        assert verdict.found is None
