"""The root state: the choice of the root unit, its other units, and the reset of state before each iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from spec_tests.engine.small import (
    assert_at_rest,
    assert_gradients,
    draw,
    is_open,
    mean_gradients,
    shard_each,
    square_loss,
    train_once,
    units_of,
)
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, chain
from spec_tests.models.running import Wire
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, trace

FULL, KEEP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
each_strategy = pytest.mark.parametrize("strategy", [FULL, KEEP, NONE], ids=lambda s: s.name)


def with_own_layer() -> nn.Sequential:
    """Two blocks and a layer that belongs to the root."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.25)
    return nn.Sequential(*chain(2), layer).to(device())


def sharded(**options: Any) -> Any:
    model = with_own_layer()
    for index in (0, 1):
        model[index] = FSDP(model[index], device_id=device(), **options)
    return FSDP(model, device_id=device(), **options)


# --- the root state ---


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_unit_with_the_first_outer_forward_is_the_root() -> None:
    model = sharded()
    model(draw(0))
    root, first, second = units_of(model)
    assert [unit.name for unit in (root, first, second)] == ["", "0", "1"]
    assert [unit.policy.keep_unsharded_for_backward for unit in (root, first, second)] == [True, False, False]
    tree = model._root_state
    assert all(wrapper._root_state is tree for wrapper in FSDP.fsdp_modules(model))
    assert tree.outermost is root
    assert root.inner == {first, second}
    assert first.inner == second.inner == frozenset()


@ranks(2)
def test_units_of_one_tree_share_comm_streams_and_limiter() -> None:
    one, other = sharded(), sharded()
    for model in (one, other):
        model(draw(0))
        comm_streams, limiter = model._root_state.comm_streams, model._root_state.limiter
        assert all(unit.comm_streams is comm_streams for unit in units_of(model))
        assert all(unit.limiter is limiter for unit in units_of(model))
    assert one._root_state.limiter is not other._root_state.limiter


@ranks(2)
def test_two_trees_in_one_loss_train_both() -> None:
    one, other = sharded(), shard_each(chain(3))
    plain = nn.ModuleList([with_own_layer(), chain(3)])

    def of_both(models: Any, rank: int) -> Tensor:
        return models[0](models[1](draw(rank))).square().mean()

    for _ in range(2):
        one.zero_grad()
        other.zero_grad()
        of_both((one, other), dist.get_rank()).backward()
        expected = mean_gradients(plain, of_both)
        for index, model in enumerate((one, other)):
            prefix = f"{index}."
            mine = {n.removeprefix(prefix): g for n, g in expected.items() if n.startswith(prefix)}
            assert_gradients(model, mine)
            assert_at_rest(model)


# --- a submodule that ran on its own first ---


@pytest.mark.spec("CTOR-11")
@pytest.mark.parametrize("before", ["trained", "ran forward", "was evaluated", "broke off"])
@each_strategy
@ranks(2)
def test_root_takes_over_submodule_that_ran_alone(strategy: ShardingStrategy, before: str) -> None:
    model = sharded(sharding_strategy=strategy)
    plain = with_own_layer()
    part = model[0]
    if before == "trained":
        part(draw(3)).sum().backward()
    elif before == "ran forward":
        part(draw(3))
    elif before == "was evaluated":
        with torch.no_grad():
            part(draw(3))
    else:
        with pytest.raises(RuntimeError):
            part(torch.ones(1, 17, device=device()))
    model.zero_grad()
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder:
            train_once(model)
        assert_gradients(model, mean_gradients(plain, square_loss))
        assert recorder.count("RS" if strategy is not NONE else "AR") == 3, "each unit once, also the one taken over"
        assert_at_rest(model)
    assert part._root_state is model._root_state


@pytest.mark.spec("CTOR-11")
@ranks(2)
def test_former_root_in_a_larger_tree_reshards_after_forward() -> None:
    model = sharded()
    model[0](draw(3))
    unit = model[0]._unit
    assert unit.policy.keep_unsharded_for_backward
    assert unit.name == ""
    model(draw(0))
    assert not unit.policy.keep_unsharded_for_backward
    assert unit.name == "0"
    assert not is_open(unit)


@pytest.mark.spec("FWD-02")
@each_strategy
@ranks(2)
def test_submodule_runs_alone_after_root(strategy: ShardingStrategy) -> None:
    model = sharded(sharding_strategy=strategy)
    plain = with_own_layer()
    train_once(model)
    model.zero_grad()
    output = model[0](draw(dist.get_rank()))
    torch.testing.assert_close(output, plain[0](draw(dist.get_rank())))
    output.square().mean().backward()
    assert_gradients(model, mean_gradients(plain, lambda m, rank: m[0](draw(rank)).square().mean()))
    assert_at_rest(model)
    model.zero_grad()
    train_once(model)
    assert_gradients(model, mean_gradients(plain, square_loss))


@ranks(2)
def test_submodule_is_evaluated_before_backward_of_root() -> None:
    model = sharded()
    plain = with_own_layer()
    loss = square_loss(model, dist.get_rank())
    with torch.no_grad():
        model[1](draw(9))
    loss.backward()
    assert_gradients(model, mean_gradients(plain, square_loss))
    assert_at_rest(model)


# --- no stale weights ---


def halve_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def replace_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def step_all(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.125).step()
    for parameter in parameters:
        parameter.grad = None


def load_all(model: nn.Module) -> None:
    """Changes the unsharded parameters inside ``summon_full_params``."""
    if not isinstance(model, FSDP):
        halve_all(model)
        return
    with FSDP.summon_full_params(model):
        halve_all(model)


CHANGES = {"in place": halve_all, "other memory": replace_all, "a step": step_all, "while summoned": load_all}


@pytest.mark.spec("SHARD-05", "SHARD-08")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@each_strategy
@ranks(2)
def test_parameters_that_changed_after_a_forward_without_backward_are_new_in_the_next_forward(
    strategy: ShardingStrategy, change: str, original: bool
) -> None:
    if original and strategy is KEEP and change != "while summoned":
        # The registered parameters are then the all-gathered copies (ORIG-09), and changes to them are lost (FWD-05).
        strategy = FULL
    model = sharded(sharding_strategy=strategy, use_orig_params=original)
    plain = with_own_layer()
    train_once(model)
    model.zero_grad()
    for _ in range(2):
        model(draw(4))
        CHANGES[change](model)
        CHANGES[change](plain)
        torch.testing.assert_close(model(draw(5)), plain(draw(5)))
    train_once(model)
    assert_gradients(model, mean_gradients(plain, square_loss))
    assert_at_rest(model)


@pytest.mark.spec("SHARD-10")
@pytest.mark.parametrize("change", ["in place", "other memory", "while summoned"])
@ranks(2)
def test_parameters_that_changed_under_no_sync_are_new_in_the_next_forward(change: str) -> None:
    model = sharded(sharding_strategy=KEEP)
    plain = with_own_layer()
    train_once(model)
    with model.no_sync():
        train_once(model)
        model.zero_grad()
        CHANGES[change](model)
        CHANGES[change](plain)
        torch.testing.assert_close(model(draw(5)), plain(draw(5)))


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


@each_strategy
@ranks(2)
def test_unchanged_params_are_not_all_gathered_again(strategy: ShardingStrategy) -> None:
    model = sharded(sharding_strategy=strategy)
    train_once(model)
    model(draw(0))
    with Wire() as wire:
        model(draw(0))
    assert wire.calls().count("AG") == {FULL: 2, KEEP: 0, NONE: 0}[strategy]


# --- after an exception ---


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
    fuse = fuse_at(model, place)
    # Once in the first iteration, which records the orders, and once in a later iteration.
    for _ in range(2):
        fuse.breaks_in = moment
        with pytest.raises(OnPurpose):
            train_once(model, from_input)
        fuse.breaks_in = None
        for _ in range(2):
            model.zero_grad()
            train_once(model, from_input)
            assert_gradients(model, expected)
            assert_at_rest(model)


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("moment", ["forward", "backward"])
@ranks(2)
def test_parameters_changed_after_an_exception_are_used_in_the_next_iteration(moment: str, original: bool) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return FSDP(module, device_id=device(), use_orig_params=original)

    model: Any = with_fuses(wrap)
    plain = with_fuses(lambda module: module)
    train_once(model, from_input)
    fuse = fuse_at(model, "inside 1")
    fuse.breaks_in = moment
    with pytest.raises(OnPurpose):
        train_once(model, from_input)
    fuse.breaks_in = None
    model.zero_grad()
    train_once(model, from_input)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.step()
    for parameter, gradient in zip(plain.parameters(), mean_gradients(plain, from_input).values(), strict=True):
        assert gradient is not None
        parameter.data -= 0.5 * gradient
    model.zero_grad()
    train_once(model, from_input)
    assert_gradients(model, mean_gradients(plain, from_input))


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
    for _ in range(2):
        model.zero_grad()
        train_once(model, from_input)
        assert_gradients(model, expected)
        assert_at_rest(model)


@pytest.mark.spec("NEW-15", "SHARD-14")
@each_strategy
@ranks(2)
def test_an_evaluation_may_follow_an_exception_and_be_interrupted_by_one(strategy: ShardingStrategy) -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device(), sharding_strategy=strategy))
    plain = with_fuses(lambda module: module)
    fuse = fuse_at(model, "inside 1")
    for moment in ("forward", "backward"):
        fuse.breaks_in = moment
        with pytest.raises(OnPurpose):
            train_once(model, from_input)
        fuse.breaks_in = None
        with torch.no_grad():
            torch.testing.assert_close(model(draw(4)), plain(draw(4)))
        if strategy is not ShardingStrategy.SHARD_GRAD_OP:
            # SHARD_GRAD_OP keeps the parameters for the next evaluation (FRESH-03).
            assert_at_rest(model)
    fuse.breaks_in = "forward"
    with torch.no_grad(), pytest.raises(OnPurpose):
        model(draw(4))
    fuse.breaks_in = None
    model.zero_grad()
    train_once(model, from_input)
    assert_gradients(model, mean_gradients(plain, from_input))


@pytest.mark.spec("NEW-15")
@ranks(2)
def test_interrupted_iteration_does_not_break_another_one_between_forward_and_backward() -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device()))
    plain = with_fuses(lambda module: module)
    loss = from_input(model, dist.get_rank())
    fuse = fuse_at(model, "inside 1")
    fuse.breaks_in = "forward"
    with pytest.raises(OnPurpose):
        from_input(model, dist.get_rank())
    fuse.breaks_in = None
    loss.backward()
    assert_gradients(model, mean_gradients(plain, from_input))
    model.zero_grad()
    train_once(model, from_input)
    assert_gradients(model, mean_gradients(plain, from_input))
    assert_at_rest(model)


@pytest.mark.spec("NEW-15", "PREF-12")
@pytest.mark.parametrize("moment", ["forward", "backward"])
@ranks(2)
def test_exception_in_the_first_iteration_does_not_change_the_forward_prefetch_order(
    moment: str,
) -> None:
    model: Any = with_fuses(lambda module: FSDP(module, device_id=device(), forward_prefetch=True))
    fuse = fuse_at(model, "inside 1")
    fuse.breaks_in = moment
    with pytest.raises(OnPurpose):
        train_once(model, from_input)
    fuse.breaks_in = None
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
    fuse = fuse_at(model, "inside 1")
    fuse.breaks_in = "backward"
    with pytest.raises(OnPurpose), model.no_sync():
        train_once(model, from_input)
    fuse.breaks_in = None
    model.zero_grad()
    with trace.record() as recorder:
        train_once(model, from_input)
    assert recorder.count("RS") == 4
    assert_gradients(model, mean_gradients(with_fuses(lambda module: module), from_input))
