"""A forward that was refused has ended, so a forward in another thread may begin."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import sharded, wrapped


@pytest.mark.spec("AGREE-08")
@pytest.mark.parametrize("build", [wrapped, sharded])
@ranks(2)
def test_after_a_refused_forward_another_thread_may_run_the_model(build: Callable[[], Any]) -> None:
    model = build()
    expected = model(batch()).tolist()
    with pytest.raises(RuntimeError, match="transform"):
        torch.func.vjp(model, batch())
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: model(batch()).tolist()).result() == expected
    assert model(batch()).tolist() == expected
