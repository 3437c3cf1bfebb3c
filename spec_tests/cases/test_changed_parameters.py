"""A backward through a unit whose parameters have changed since the forward is refused."""

from __future__ import annotations

import pytest
import torch

from spec_tests.cases.programs import Net, batch, sharded
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind
from spec_tests.subject import FullyShardedDataParallel


@pytest.mark.spec("PROG-26")
@pytest.mark.parametrize("change", ["optimizer", "in place"])
@every_kind
@ranks(2)
def test_a_backward_after_an_optimizer_step_is_refused_and_the_next_iteration_works(kind: str, change: str) -> None:
    model = sharded(kind, Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch()).mean().backward()
    loss = model(batch()).mean()
    if change == "optimizer":
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.9)
    with pytest.raises(RuntimeError, match="#E-changed-since-forward"):
        loss.backward()
    optimizer.zero_grad()
    model(batch()).mean().backward()
    optimizer.step()


@pytest.mark.spec("PROG-26")
@ranks(2)
def test_a_backward_after_summon_full_params_is_not_refused() -> None:
    model = sharded("flat FULL_SHARD", Net())
    loss = model(batch()).mean()
    with FullyShardedDataParallel.summon_full_params(model):
        pass
    loss.backward()


@pytest.mark.spec("PROG-26")
@every_kind
@ranks(2)
def test_a_step_without_gradients_of_a_model_does_not_affect_its_backward(kind: str) -> None:
    first, second = sharded(kind, Net()), sharded(kind, Net())
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    losses = [first(batch()).sum(), second(batch()).sum()]
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
