"""Options of `fully_shard` for special hardware and communication. They have no effect, or an error names another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

from spec_tests import subject
from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import iterate
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_gradients, mean_gradients
from spec_tests.subject import DataParallelMeshDims


@pytest.mark.spec("NEW-17", "MIG-21")
@pytest.mark.pure
@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"])
def test_the_names_of_classes_are_those_of_torch(name: str) -> None:
    assert getattr(subject.engine, name).__name__ == getattr(torch_fsdp, name).__name__ == name
    assert name in subject.engine.__all__


def outcome(call: Callable[[], Any]) -> str:
    """The name of the exception that a call raises; "ok" if it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "ok"


# The name and argument of a method, and its outcome in torch 2.13.
VALUES: list[tuple[str, Any, str]] = [
    ("set_reduce_scatter_max_input_buffers", 1, "ok"),
    ("set_reduce_scatter_max_input_buffers", 3, "ok"),
    ("set_reduce_scatter_max_input_buffers", 0, "ValueError"),
    ("set_reduce_scatter_max_input_buffers", -1, "ValueError"),
    ("set_reduce_scatter_max_input_buffers", True, "TypeError"),
    ("set_reduce_scatter_max_input_buffers", 1.0, "TypeError"),
    ("set_reduce_scatter_max_input_buffers", "1", "TypeError"),
    ("set_separate_reduce_scatter_group", False, "ok"),
    ("set_allocate_memory_from_process_group_for_comm", False, "ok"),
    ("_set_unshard_async_op", True, "ok"),
    ("_set_unshard_async_op", False, "ok"),
]


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize(("name", "value", "in_torch"), VALUES)
@ranks(2)
def test_an_option_has_no_effect_and_a_wrong_value_has_the_error_of_torch(name: str, value: Any, in_torch: str) -> None:
    model, theirs = sharded(), torch_fsdp.fully_shard(seeded())
    # Torch 2.11 does not have all of these methods.
    if hasattr(torch_fsdp.FSDPModule, name):
        assert outcome(lambda: getattr(theirs, name)(value)) == in_torch
    assert outcome(lambda: getattr(model, name)(value)) == in_torch
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()))


@pytest.mark.spec("NEW-18")
@pytest.mark.pure
@pytest.mark.parametrize("given", [{}, {"shard": None, "replicate": None}], ids=str)
def test_the_error_without_dimensions_names_both_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rank 0: .*shard=.*replicate="):
        DataParallelMeshDims(**given)
