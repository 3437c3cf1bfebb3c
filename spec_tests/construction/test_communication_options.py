"""Options of `fully_shard` for special hardware and communication. They have no effect, or an error names another."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

from spec_tests import subject
from spec_tests.harness import ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import sharded
from spec_tests.subject import DataParallelMeshDims


@pytest.mark.spec("NEW-17", "MIG-21")
@pytest.mark.pure
@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"])
def test_the_names_of_classes_are_those_of_torch(name: str) -> None:
    assert getattr(subject.engine, name).__name__ == getattr(torch_fsdp, name).__name__ == name
    assert name in subject.engine.__all__


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_options_have_no_effect_on_training() -> None:
    model = sharded()
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group(False)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model._set_unshard_async_op(True)
    assert_trains_like(model)


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)]
)
@ranks(2)
def test_a_wrong_value_has_the_error_of_torch(value: Any, error: type[Exception]) -> None:
    models = [sharded(), torch_fsdp.fully_shard(seeded())]
    # Torch 2.11 does not have this method.
    for model in models if hasattr(torch_fsdp.FSDPModule, "set_reduce_scatter_max_input_buffers") else models[:1]:
        with pytest.raises(error, match=r"max_input_buffers (must|should) be a"):
            model.set_reduce_scatter_max_input_buffers(value)


@pytest.mark.spec("NEW-18")
@pytest.mark.pure
@pytest.mark.parametrize("given", [{}, {"shard": None, "replicate": None}], ids=str)
def test_the_error_without_dimensions_names_both_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rank 0: .*shard=.*replicate="):
        DataParallelMeshDims(**given)
