"""Mistakes that would otherwise cause no error are detected at the next step."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.harness.programs import output_of_ranks
from spec_tests.models.modules import chain
from spec_tests.models.small import draw, shard_each, train_once
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import fully_shard


def warnings_of(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


# --- an optimizer that was built before wrapping ---


@pytest.mark.spec("CTOR-05")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@ranks(2)
def test_each_optimizer_from_before_wrapping_warns_once_with_the_numbers_and_changes_nothing(
    kind: type[torch.optim.Optimizer],
) -> None:
    plain, other = chain(2), nn.Linear(2, 2)
    optimizers = [kind([*plain.parameters(), *other.parameters()], lr=0.5) for _ in range(2)]  # type: ignore[call-arg]
    model = shard_each(plain)
    before = full_values(model)
    for optimizer in optimizers:
        train_once(model)
        (message,) = warnings_of(optimizer.step)
        # The parameters of the other model were not replaced.
        assert f"rank {dist.get_rank()}: 8 of 10 parameters of this {kind.__name__} were replaced" in message
        assert "build the optimizer after wrapping" in message
        assert_same(full_values(model), before, bitwise=True)
        assert warnings_of(optimizer.step) == [], "the second step does not warn"


@pytest.mark.spec("PROG-105")
@ranks(2)
def test_an_optimizer_of_unsharded_parameters_warns_once_and_a_later_one_does_not() -> None:
    model = chain(2).to(device())
    for block in model:
        fully_shard(block)
    root: Any = fully_shard(nn.Sequential(model, nn.Linear(draw(0).shape[-1], 3, device=device())))
    root(draw(0))
    early = torch.optim.SGD(root.parameters(), lr=0.1)
    root(draw(0)).sum().backward()
    late = torch.optim.SGD(root.parameters(), lr=0.1)
    (message,) = warnings_of(early.step)
    number = len(list(root.parameters()))
    assert f"rank {dist.get_rank()}: 2 of {number} parameters of this SGD are unsharded parameters" in message
    assert "before the forward, or after the backward" in message
    assert warnings_of(early.step) == []
    assert warnings_of(late.step) == []


# --- a step after no_sync without a reducing backward ---


A_NEW_PROCESS = """
import torch, torch.distributed as dist, warnings
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from minifsdp import FullyShardedDataParallel as FSDP

warnings.simplefilter("ignore")
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = FSDP(nn.Linear(3, 3), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with model.no_sync():
    model(torch.ones(2, 3)).sum().backward()
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.pure
@pytest.mark.spec("NOSYNC-10")
def test_process_with_only_original_parameters_also_checks_its_optimizers(tmp_path: Path) -> None:
    # The worker processes have run other tests before, and everything that those tests switched on is still on.
    script = tmp_path / "new_process.py"
    script.write_text(A_NEW_PROCESS)
    said = output_of_ranks(script, num_ranks=1, environment={}, limit=120)
    assert "rank 0: SGD.step() found gradients that were never reduced" in said


@pytest.mark.spec("NOSYNC-10")
@ranks(2)
def test_optimizer_without_unreduced_gradients_may_step() -> None:
    model, other = shard_each(chain(2)), shard_each(chain(1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    with model.no_sync():
        train_once(model)
    train_once(other)
    optimizer.step()


@ranks(2)
def test_model_may_be_sharded_after_another_one_is_deleted() -> None:
    # Python reuses addresses: a new parameter at an old address must not be mistaken for the old parameter.
    for _ in range(4):
        model = shard_each(chain(2))
        model(draw(0)).sum().backward()
        del model
        gc.collect()
