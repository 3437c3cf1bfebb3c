"""A warm step stays cheap: few calls and operators per unit, no slow operations, and no calls into the trace.

``count_calls.py`` counts the calls in a separate process.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from spec_tests.harness.programs import run_module

pytestmark = pytest.mark.pure
WRAPPED = [
    f"{strategy} {kind}" for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for kind in ("flat", "original")
]
IN_PLACE = ["fully_shard frees", "fully_shard keeps"]
KEYS = WRAPPED + IN_PLACE


@functools.cache
def counted() -> dict[str, Any]:
    done = run_module("spec_tests.costs.count_calls", folder=Path(__file__).parents[2], environment=os.environ)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# The operators that a unit of a matrix and a vector adds to a step, and their number.
FLAT = {
    "a split of the flat tensor, and in backward a concatenation": 2,
    "a view of the matrix, and its backward; a vector needs none": 2,
    "a shard without its graph for each copy or all-gather": 1,
    "the division of the sum": 1,
    "two gradients that autograd no longer accumulates, one that it does": 1 - 2,
}
SHARDED = {"all-gather": 1, "reduce-scatter": 1, "memory for its result": 1}
REPEATED = {"a second shard without its graph": 1, "a second all-gather": 1}
PER_PARAMETER = {
    "a view of the input, and its backward": 2,
    "memory for the all-gather, its view by rank, and a copy to the parameters": 3,
    "memory for the packed gradients, its view by rank, and a copy from the gradients": 3,
    "a split of the result, and a view of the matrix": 2,
    "the division of the sum": 1,
}
OPERATORS = {
    "FULL_SHARD flat": FLAT | SHARDED | REPEATED,
    "FULL_SHARD original": FLAT | SHARDED | REPEATED | {"a split of the result": 1},
    "SHARD_GRAD_OP flat": FLAT | SHARDED,
    "SHARD_GRAD_OP original": FLAT | SHARDED | {"a split of the result": 1},
    "NO_SHARD flat": FLAT | {"all-reduce": 1},
    "NO_SHARD original": FLAT | {"all-reduce": 1, "a split of the result, and a view of the matrix": 2},
    "fully_shard frees": PER_PARAMETER | SHARDED | {"a second all-gather": 1, "its memory, view and copy": 3},
    "fully_shard keeps": PER_PARAMETER | SHARDED,
}


@pytest.mark.parametrize("key", KEYS)
def test_a_unit_adds_only_the_operators_that_it_needs(key: str) -> None:
    added = counted()["costs"][f"minifsdp {key}"]["operators"]
    assert added == sum(OPERATORS[key].values())


# Measured with torch 2.13, calls of a unit in a step here and in torch: 100 and 734 with FULL_SHARD, 138 and 783 with
# fully_shard. In torch 2.11, the fully_shard of torch needs fewer: 689, and 510 where units are kept.
@pytest.mark.parametrize("key", KEYS)
def test_torch_needs_several_times_as_many_calls_and_operators(key: str) -> None:
    ours, theirs = counted()["costs"][f"minifsdp {key}"], counted()["costs"][f"torch {key}"]
    times = 2.5 if key in IN_PLACE else 4
    assert theirs["calls"] > times * ours["calls"]
    assert theirs["calls into C"] > times * ours["calls into C"]
    assert theirs["operators"] > (2 if key in IN_PLACE else 3) * ours["operators"]


@pytest.mark.spec("LEDGER-01")
@pytest.mark.parametrize("key", KEYS)
def test_collective_log_adds_few_calls(key: str) -> None:
    # 3 where units are freed after forward, 2 where they are kept, 1 where they are not sharded.
    calls = counted()["ledger"][key]
    assert 1 <= calls["call"] <= 3
    # The hash, the list of the last entries, and the identity and the sequence of the unit. For a collective of a unit,
    # the log does not search the frames of the program, which takes several calls for each frame.
    assert calls["c_call"] <= 6 * calls["call"]


@pytest.mark.parametrize("key", KEYS)
def test_with_tracing_off_no_function_of_the_trace_is_called(key: str) -> None:
    assert counted()["trace"][key] == 0


def test_recording_calls_the_functions_of_the_trace() -> None:
    # Two compute spans, two all-gathers and one reduction have a begin and an end each; two frees have only a begin.
    assert counted()["trace"]["recording"] >= 12
