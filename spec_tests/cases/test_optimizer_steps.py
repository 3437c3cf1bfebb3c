"""The count of the optimizer steps of a process, whose ranks may be threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.cases.optimizer_steps import OptimizerSteps
from minifsdp.engine.layout import Steps


@pytest.mark.pure
@pytest.mark.cpu
@pytest.mark.spec("LEDGER-19")
def test_a_rank_may_step_while_another_rank_shards_a_model() -> None:
    counter, weight = OptimizerSteps(), nn.Parameter(torch.ones(1))

    class Sharded:
        """Replaces a layout. The other rank shards a model while this one is looked at."""

        leaves = ()
        stepped_at, steps, group = 0, Steps(), None

        @property
        def local_parameters(self) -> list[nn.Parameter]:
            if other_rank.ident is None:
                other_rank.start()
                other_rank.join(0.2)
            return [weight]

    layouts: list[Any] = [Sharded() for _ in range(3)]
    other_rank = threading.Thread(target=counter.add, args=(layouts[2],))
    try:
        for layout in layouts[:2]:
            counter.add(layout)
        assert counter._count_step(torch.optim.SGD([weight]))
        other_rank.join()
        assert len(counter._layouts) == 3
    finally:
        counter._hook.remove()
