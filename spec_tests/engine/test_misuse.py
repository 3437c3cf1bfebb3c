"""Mistakes that would otherwise cause no error are detected at the next step."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.engine.small import draw, shard_each, train_once, units_of
from spec_tests.harness import device, ranks
from spec_tests.harness.programs import output_of_ranks
from spec_tests.models.modules import MLP, chain
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import fully_shard


def warnings_of(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def gathered(model: FSDP) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]


# --- an optimizer that was built before wrapping ---


@pytest.mark.spec("CTOR-05")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@ranks(2)
def test_an_optimizer_from_before_wrapping_warns_once_with_the_numbers_and_changes_nothing(
    kind: type[torch.optim.Optimizer],
) -> None:
    plain = chain(2)
    optimizer = kind(plain.parameters(), lr=0.5)  # type: ignore[call-arg]
    model = shard_each(plain)
    before = gathered(model)
    train_once(model)
    (message,) = warnings_of(optimizer.step)
    assert f"rank {dist.get_rank()}: 8 of 8 parameters of this {kind.__name__} were replaced" in message
    assert "build the optimizer after wrapping" in message
    for old, new in zip(before, gathered(model), strict=True):
        assert torch.equal(old, new)
    train_once(model)
    assert warnings_of(optimizer.step) == [], "once is enough"


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


@pytest.mark.spec("CTOR-05")
@ranks(2)
def test_the_warning_counts_only_the_parameters_that_were_replaced() -> None:
    plain, other = chain(2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(plain.parameters())}, {"params": list(other.parameters())}], lr=0.1)
    shard_each(plain)
    (message,) = warnings_of(optimizer.step)
    assert "8 of 10 parameters" in message


@pytest.mark.spec("CTOR-05")
@ranks(2)
def test_each_optimizer_from_before_wrapping_is_warned_about() -> None:
    plain = chain(1)
    optimizers = [torch.optim.SGD(plain.parameters(), lr=0.1) for _ in range(2)]
    shard_each(plain)
    assert [len(warnings_of(optimizer.step)) for optimizer in optimizers] == [1, 1]


@pytest.mark.spec("CTOR-05")
@ranks(2)
def test_an_optimizer_from_after_wrapping_does_not_warn_and_changes_the_model() -> None:
    model = shard_each(chain(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = gathered(model)
    train_once(model)
    assert warnings_of(optimizer.step) == []
    assert not all(torch.equal(old, new) for old, new in zip(before, gathered(model), strict=True))


@pytest.mark.spec("CTOR-05")
@ranks(2)
def test_with_original_parameters_an_optimizer_from_before_wrapping_works_and_does_not_warn() -> None:
    plain = chain(2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    model = shard_each(plain, use_orig_params=True)
    before = gathered(model)
    train_once(model)
    assert warnings_of(optimizer.step) == []
    assert not all(torch.equal(old, new) for old, new in zip(before, gathered(model), strict=True))


@ranks(2)
def test_optimizer_of_an_unsharded_model_is_not_checked() -> None:
    shard_each(chain(1))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    assert warnings_of(optimizer.step) == []


@ranks(2)
def test_replaced_original_parameters_are_not_kept_alive() -> None:
    plain = chain(1)
    originals = [weakref.ref(parameter) for parameter in plain.parameters()]
    model = shard_each(plain)
    gc.collect()
    assert [reference() for reference in originals] == [None] * 4
    assert len(list(model.parameters())) == 1


# --- a step after no_sync without a reducing backward ---


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@ranks(2)
def test_a_step_that_finds_unreduced_gradients_raises_with_the_remedy(
    kind: type[torch.optim.Optimizer], original: bool
) -> None:
    model = shard_each(chain(2), use_orig_params=original)
    optimizer = kind(model.parameters(), lr=0.5)  # type: ignore[call-arg]
    before = gathered(model)
    with model.no_sync():
        train_once(model)
    with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}: {kind.__name__}\.step\(\) found gradients") as e:
        optimizer.step()
    assert "never reduced" in str(e.value)
    assert "zero_grad()" in str(e.value)
    assert all(torch.equal(old, new) for old, new in zip(before, gathered(model), strict=True))


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
@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_error_is_raised_again_until_the_remedy_is_applied(original: bool) -> None:
    model = shard_each(chain(2), use_orig_params=original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with model.no_sync():
        train_once(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="never reduced"):
            optimizer.step()


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("remedy", ["a reducing backward", "zero_grad"])
@ranks(2)
def test_step_is_allowed_after_the_remedy(remedy: str, original: bool) -> None:
    model = shard_each(chain(2), use_orig_params=original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with model.no_sync():
        train_once(model)
    if remedy == "zero_grad":
        optimizer.zero_grad()
    else:
        train_once(model)
    optimizer.step()
    train_once(model)
    optimizer.step()


@pytest.mark.spec("NOSYNC-10")
@ranks(2)
def test_optimizer_without_unreduced_gradients_may_step() -> None:
    model, other = shard_each(chain(2)), shard_each(chain(1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    with model.no_sync():
        train_once(model)
    train_once(other)
    optimizer.step()


# --- parameters that are tied across units ---


def two_tied(where: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), MLP(3, 4))
    inner: Any = model[1]
    if where == "two inner units":
        inner[1].weight = model[0].weight
    else:
        block: Any = model[2]
        inner[1].bias = block.down.bias
    return model.to(device())


@pytest.mark.spec("ORIG-16")
@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_a_parameter_of_two_inner_units_raises_with_both_names(original: bool) -> None:
    model = two_tied("two inner units")
    with pytest.raises(ValueError, match="tied across units") as caught:
        shard_each(model, use_orig_params=original)
    message = str(caught.value)
    assert f"rank {dist.get_rank()}" in message
    assert "'weight'" in message
    assert "'1.weight'" in message
    assert "as one unit" in message


@pytest.mark.spec("ORIG-16")
@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_a_parameter_of_an_inner_unit_and_of_the_root_raises_with_both_names(original: bool) -> None:
    model = two_tied("an inner unit and the root")
    model[2] = FSDP(model[2], device_id=device(), use_orig_params=original)
    with pytest.raises(ValueError, match="tied across units") as caught:
        FSDP(model, device_id=device(), use_orig_params=original)
    message = str(caught.value)
    assert "'1.1.bias'" in message
    assert "'down.bias'" in message


@pytest.mark.spec("ORIG-15")
@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_parameter_tied_inside_one_unit_is_accepted(original: bool) -> None:
    model = FSDP(two_tied("two inner units"), device_id=device(), use_orig_params=original)
    assert len(units_of(model)) == 1
    model(draw(0)).sum().backward()


@ranks(2)
def test_model_may_be_sharded_after_another_one_is_deleted() -> None:
    # Python reuses addresses: a new parameter at an old address must not be mistaken for the old parameter.
    for _ in range(4):
        model = shard_each(chain(2))
        model(draw(0)).sum().backward()
        del model
        gc.collect()
