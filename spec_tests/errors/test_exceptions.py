"""The iteration after an exception in forward, backward or a recomputation is correct, and uses the current weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from minifsdp.engine.unit import Phase, State
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, chain
from spec_tests.models.small import (
    assert_gradients,
    assert_trains,
    draw,
    halve_all,
    mean_gradients,
    train_once,
    units_of,
)
from spec_tests.models.three_units import each_strategy
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, trace


class OnPurpose(Exception):
    """The exception that a `Fuse` raises."""


class Fuse(nn.Module):
    """Identity. Raises if `breaks_in` is set."""

    breaks_in: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks_in == "forward" or (
            self.breaks_in == "recomputation" and torch._C._current_graph_task_id() >= 0
        ):
            raise OnPurpose
        if self.breaks_in == "backward":
            x.register_hook(self.blow)
        return x.view_as(x)

    def blow(self, gradient: Tensor) -> Tensor:
        raise OnPurpose


class Fused(MLP):
    """A block with a fuse between its layers."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.fuse(torch.tanh(self.up(x))))


def with_fuses(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """Fuses before, between, inside and after three units. A layer of the root follows at the end."""
    torch.manual_seed(8)
    blocks = [wrap(block.to(device())) for block in (MLP(3, 4), Fused(), MLP(3, 4))]
    layer = nn.Linear(3, 2).to(device())
    model = nn.Sequential(Fuse(), blocks[0], Fuse(), blocks[1], Fuse(), blocks[2], Fuse(), layer, Fuse())
    return wrap(model)  # type: ignore[return-value]


@contextlib.contextmanager
def breaking(model: nn.Module, moment: str, place: str = "inside 1") -> Iterator[None]:
    """Code in which the fuse at ``place`` raises."""
    fuse = fuse_at(model, place)
    fuse.breaks_in = moment
    with pytest.raises(OnPurpose):
        yield
    fuse.breaks_in = None


def fuse_at(model: nn.Module, place: str) -> Fuse:
    fuses = [module for module in model.modules() if isinstance(module, Fuse)]
    places = ["before all", "between 0 and 1", "inside 1", "between 1 and 2", "after the units", "after all"]
    return dict(zip(places, fuses, strict=True))[place]


def from_input(model: nn.Module, rank: int) -> Tensor:
    return model(draw(rank).requires_grad_()).square().mean()


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize(
    "place", ["before all", "between 0 and 1", "inside 1", "between 1 and 2", "after the units", "after all"]
)
@pytest.mark.parametrize("moment", ["forward", "backward"])
@each_strategy
@ranks(2)
def test_the_iteration_after_an_exception_is_right(strategy: ShardingStrategy, moment: str, place: str) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return FSDP(module, device_id=device(), sharding_strategy=strategy)

    model: Any = with_fuses(wrap)
    expected = mean_gradients(with_fuses(lambda module: module), from_input)
    # Once in the first iteration, which records the orders, and once in a later iteration.
    for _ in range(2):
        with breaking(model, moment, place):
            train_once(model, from_input)
        assert_trains(model, expected, from_input)


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("impl", CheckpointImpl, ids=str)
@each_strategy
@ranks(2)
def test_the_iteration_after_an_exception_in_a_recomputation_is_right(
    strategy: ShardingStrategy, impl: CheckpointImpl
) -> None:
    def build(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(8)
        blocks = [wrap(checkpoint_wrapper(block.to(device()), impl)) for block in (MLP(3, 4), Fused(), MLP(3, 4))]
        return wrap(nn.Sequential(*blocks))

    model: Any = build(lambda module: FSDP(module, device_id=device(), sharding_strategy=strategy))
    expected = mean_gradients(build(lambda module: module), from_input)
    train_once(model, from_input)
    (fuse,) = [module for module in model.modules() if isinstance(module, Fuse)]
    fuse.breaks_in = "recomputation"
    with pytest.raises(OnPurpose):
        train_once(model, from_input)
    fuse.breaks_in = None
    assert_trains(model, expected, from_input)


@pytest.mark.spec("NEW-15", "SHARD-14")
@each_strategy
@ranks(2)
def test_an_evaluation_may_follow_an_exception_and_be_interrupted_by_one(strategy: ShardingStrategy) -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device(), sharding_strategy=strategy))
    plain = with_fuses(lambda module: module)
    for moment in ("forward", "backward"):
        with breaking(model, moment):
            train_once(model, from_input)
        with torch.no_grad():
            torch.testing.assert_close(model(draw(4)), plain(draw(4)))
        # Other units keep the parameters for the next evaluation (FRESH-03).
        resharded = [unit for unit in units_of(model) if unit.policy.reshard_after_forward]
        assert [unit.state for unit in resharded] == [State.SHARDED for _ in resharded]
        assert {unit.phase for unit in units_of(model)} == {Phase.IDLE}
    with torch.no_grad(), breaking(model, "forward"):
        model(draw(4))
    assert_trains(model, mean_gradients(plain, from_input), from_input)


@pytest.mark.spec("NEW-15")
@ranks(2)
def test_interrupted_iteration_does_not_break_another_one_between_forward_and_backward() -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device()))
    plain = with_fuses(lambda module: module)
    loss = from_input(model, dist.get_rank())
    with breaking(model, "forward"):
        from_input(model, dist.get_rank())
    loss.backward()
    expected = mean_gradients(plain, from_input)
    assert_gradients(model, expected)
    assert_trains(model, expected, from_input)


@pytest.mark.spec("NEW-15", "PREF-12")
@pytest.mark.parametrize("moment", ["forward", "backward"])
@ranks(2)
def test_exception_in_the_first_iteration_does_not_change_the_forward_prefetch_order(
    moment: str,
) -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device(), forward_prefetch=True))
    with breaking(model, moment):
        train_once(model, from_input)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_once(model, from_input)
        with trace.record() as recorder:
            train_once(model, from_input)
    forward = recorder.order("AG", "F")[:8]
    assert forward == ["AG", "AG 1", "F", "AG 3", "F 1", "AG 5", "F 3", "F 5"]


@pytest.mark.spec("NEW-15", "NOSYNC-06")
@ranks(2)
def test_an_exception_inside_no_sync_ends_it() -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device()))
    with breaking(model, "backward"), model.no_sync():
        train_once(model, from_input)
    expected = mean_gradients(with_fuses(lambda module: module), from_input)
    assert assert_trains(model, expected, from_input).count("RS") == 4


class Detour(nn.Module):
    """Three blocks. A fuse precedes the middle block, which can be skipped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.side, self.last = map(wrap, chain())
        self.fuse = Fuse()

    def forward(self, x: Tensor, detour: bool = True) -> Tensor:
        x = self.fuse(self.first(x))
        return self.last(self.side(x) if detour else x)


@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("why", ["another branch", "an exception"])
@ranks(2)
def test_unused_prefetch_is_not_used_after_change(why: str) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return FSDP(module, device_id=device(), forward_prefetch=True)

    model: Any = wrap(Detour(wrap))
    plain = Detour(lambda module: module)
    train_once(model)
    model.zero_grad()
    if why == "an exception":
        model.fuse.breaks_in = "forward"
        with pytest.raises(OnPurpose):
            model(draw(0))
        model.fuse.breaks_in = None
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(draw(0), detour=False)
    halve_all(model)
    halve_all(plain)
    torch.testing.assert_close(model(draw(5)), plain(draw(5)))
