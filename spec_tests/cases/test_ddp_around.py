"""``DistributedDataParallel`` around a sharded model is refused, and the members of the model can be listed."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models.sharding import sharded


@pytest.mark.spec("PROG-07")
@ranks(2)
def test_the_members_of_a_sharded_module_can_be_listed_and_ddp_is_refused() -> None:
    model = sharded()
    assert hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert dict(inspect.getmembers(model))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="E-ddp-around"):
            nn.parallel.DistributedDataParallel(model)
