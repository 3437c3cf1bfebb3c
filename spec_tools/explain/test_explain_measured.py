"""Predictions of ``explain`` that `Job` alone does not show, compared with measured memory and traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp_tools.cost import Job, cost_of
from minifsdp_tools.explain import STATES
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy
from spec_tools.explain.test_cost import JOB, Pair, Tower, assert_memory, assert_sends, job_for, weighed

LOW = torch.bfloat16


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


@pytest.mark.spec("EXPLAIN-03")
@pytest.mark.parametrize("name", STATES)
@ranks(2)
def test_supported_optimizers_have_expected_state_size(name: str) -> None:
    model = FullyShardedDataParallel(Tower().to(device()))
    kind, options = (name, {}) if "momentum" not in name else ("SGD", {"momentum": 0.9})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 64, device=device())).sum().backward()
    optimizer.step()
    (parameter,) = model.parameters()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    num_bytes = sum(value.nbytes for value in kept if value.shape == parameter.shape)
    assert minifsdp.explain(model, optimizer=name).optimizer_bytes == num_bytes


def with_a_root_that_reshards(job: Job) -> nn.Module:
    model = Tower().to(device())
    for part in (*model.pairs, model):
        subject.fully_shard(part, reshard_after_forward=True)
    return model


@pytest.mark.spec("EXPLAIN-03")
@ranks(2)
def test_root_that_reshards_is_all_gathered_twice() -> None:
    job = job_for("FULL_SHARD", per_parameter=True)
    explained = minifsdp.explain(with_a_root_that_reshards(job))
    assert explained.cost.num_collectives["AG"] == 2 * 5
    assert_memory(weighed(job, with_a_root_that_reshards), explained.cost)
    assert_sends(with_a_root_that_reshards(job), job, explained.cost)


@pytest.mark.spec("EXPLAIN-03")
@ranks(2)
def test_buffers_are_counted_in_buffer_dtype_before_the_first_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(device())
    model.register_buffer("mask", torch.ones(3, device=device()))
    model[0].register_buffer("count", torch.zeros((), dtype=torch.int64, device=device()))
    low = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(buffer_dtype=LOW))
    before = minifsdp.explain(low)
    low(torch.ones(2, 4, device=device()))
    after = minifsdp.explain(low)
    assert before.job.buffers == after.job.buffers == sum(b.nbytes for b in low.buffers()) == 3 * 2 + 8


@pytest.mark.spec("EXPLAIN-03")
@ranks(2)
def test_activations_that_are_given_are_added_to_the_peaks() -> None:
    model = FullyShardedDataParallel(Tower().to(device()), mixed_precision=MixedPrecision(LOW, torch.float32))
    without, with_them = minifsdp.explain(model).cost, minifsdp.explain(model, activations=1000).cost
    assert (with_them.stored, with_them.peak_backward) == (without.stored, without.peak_backward + 1000)


# ---- frozen ---------------------------------------------------------------------------------------------------------

HALVES = [f"pairs.{number}.first" for number in range(4)]


def partly_frozen(job: Job, parts: list[str]) -> Any:
    """A `Tower` whose modules ``parts`` are frozen, sharded as the job describes."""
    model = Tower().to(device())
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    if job.per_parameter:
        for pair in model.pairs:
            subject.fully_shard(pair, reshard_after_forward=not job.keeps)
        return subject.fully_shard(model)
    strategy = subject.ShardingStrategy[job.strategy]
    policy = ModuleWrapPolicy({Pair})
    return FullyShardedDataParallel(model, None, strategy, auto_wrap_policy=policy, use_orig_params=True)


@pytest.mark.spec("EXPLAIN-04")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    ("parts", "per_parameter", "trained"),
    [
        (["pairs.1", "pairs.2"], False, 5 / 9),
        (["pairs.1", "pairs.2"], True, 5 / 9),
        (["last"], False, 8 / 9),
        (["last"], True, 8 / 9),
        (HALVES, True, 5 / 9),
    ],
    ids=["units", "units of fully_shard", "root", "root of fully_shard", "halves of fully_shard"],
)
@ranks(2)
def test_frozen_parts_have_no_gradients(parts: list[str], per_parameter: bool, trained: float, strategy: str) -> None:
    job = job_for(strategy, per_parameter=per_parameter)
    explained = minifsdp.explain(partly_frozen(job, parts))
    assert explained.gradient_bytes == explained.parameter_bytes * trained
    assert explained.optimizer_bytes == 2 * explained.gradient_bytes
    assert explained.cost.sent["RS"] == cost_of(JOB).sent["RS"] * trained
    assert_memory(weighed(job, lambda job: partly_frozen(job, parts)), explained.cost)
    assert_sends(partly_frozen(job, parts), job, explained.cost)


@pytest.mark.filterwarnings("ignore:.*frozen parameters")
@pytest.mark.spec("EXPLAIN-04", "EXPLAIN-09")
@ranks(2)
def test_flat_unit_has_gradient_for_frozen_params() -> None:
    job = job_for("FULL_SHARD")
    found = weighed(job, lambda job: partly_frozen(job, HALVES), sgd)
    explained = minifsdp.explain(partly_frozen(job, HALVES), optimizer="SGD")
    assert_sends(partly_frozen(job, HALVES), job, explained.cost)
    assert explained.gradient_bytes == explained.parameter_bytes
    assert "the shard on a rank determines" in explained.assumptions[0]
    if dist.get_rank() == 1:
        assert_memory(found, explained.cost)
    else:
        # The first rank owns the frozen halves. The only gradient that it keeps is that of the root.
        assert found["after_backward"] - found["stored"] < explained.gradient_bytes / 2
    assert [advice.kind for advice in explained.warnings] == ["frozen"] * 4
    assert "16.4 kB of it are allocated" in explained.warnings[0].cause
    # The second rank owns all states except those of the root. The prediction is the mean of both ranks.
    with_adam = minifsdp.explain(partly_frozen(job, HALVES))
    assert with_adam.optimizer_bytes == 2 * explained.parameter_bytes * 5 / 9
