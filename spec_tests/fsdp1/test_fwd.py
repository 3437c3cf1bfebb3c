"""Calls of units and other modules, the parameters of a module in forward, and accumulation over several passes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.checkpoint.checkpoints import is_plain
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, WIDTH, Block, Scale, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, as_torch, wrapped
from spec_tests.models.values import (
    assert_same,
    chunked,
    flat_gradients,
    flat_parameters,
    full_values,
    local_gradients,
    mean_gradients,
    named,
)
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, trace

FSDP = FullyShardedDataParallel
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- a submodule that is not a unit ---


def nothing_yet(model: FSDP) -> None:
    pass


def a_forward(model: FSDP) -> None:
    model(batch())


def an_evaluation(model: FSDP) -> None:
    with torch.no_grad():
        model(batch())


def an_iteration(model: FSDP) -> None:
    iterate(model)


MOMENTS = {moment.__name__: moment for moment in (nothing_yet, a_forward, an_evaluation, an_iteration)}
after = pytest.mark.parametrize("after", list(MOMENTS))


@pytest.mark.spec("FWD-01", "NAMES-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@after
@flat_or_original
@ranks(2)
def test_direct_call_of_unwrapped_part_raises_with_remedy(keep: bool, after: str, strategy: ShardingStrategy) -> None:
    if keep and strategy is SHARD_GRAD_OP and after == "a_forward":
        # Unsharded until backward, and registered on the module (ORIG-09). The test below covers this case.
        return
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    MOMENTS[after](model)
    with refused(RuntimeError, "parameter 'enter.", "wrap that part as a unit of its own"):
        model.module.enter(batch())
    with refused(RuntimeError, "parameter 'linear.", "wrap that part as a unit of its own"):
        model.module.blocks[1].module(batch())
    with refused(RuntimeError, "wrap"):
        model.module(batch())
    model.zero_grad()
    iterate(model)
    plain = seeded()
    expected = mean_gradients(plain)
    if not keep:
        assert_same(flat_gradients(model), chunked(plain, expected, 2, dist.get_rank()))
        return
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.spec("FWD-01")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_original_parameters_with_a_coincidentally_correct_shape_are_refused(strategy: ShardingStrategy) -> None:
    # A shard of one element broadcasts, and with NO_SHARD every shape is right, so no other error would occur.
    model = FSDP(Scale(2), sharding_strategy=strategy, use_orig_params=True, device_id=device())
    with refused(RuntimeError, "parameter 'weight'", "wrap that part"):
        model.module(torch.ones(3, 2, device=device()))
    model(torch.ones(3, 2, device=device())).sum().backward()


@pytest.mark.spec("FWD-01", "ORIG-09")
@ranks(2)
def test_original_parameters_kept_for_backward_may_be_used_outside_the_wrapper_forward() -> None:
    model, plain = wrapped(sharding_strategy=SHARD_GRAD_OP, use_orig_params=True), seeded()
    (model(batch()).sum() + model.module.enter(batch()).sum()).backward()
    for rank in range(2):
        x = batch(0, rank)
        ((plain(x).sum() + plain.enter(x).sum()) / 2).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        gradient = model.module.enter.weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient, plain.enter.weight.grad)


# --- a submodule that is a unit ---


def pair() -> nn.Module:
    """A model that is trained as a whole and whose first half is also used alone."""
    return nn.Sequential(OrderedDict(encoder=nn.Sequential(Block(), Block()), decoder=nn.Linear(WIDTH, 2)))


def wrapped_pair(keep: bool = False, strategy: ShardingStrategy = FULL_SHARD) -> tuple[nn.Module, FSDP]:
    plain = seeded(pair)
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": keep}
    model.encoder = FSDP(model.encoder, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return plain, FSDP(model, **options)


@pytest.mark.spec("FWD-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_a_part_that_is_a_unit_can_run_alone(keep: bool, strategy: ShardingStrategy) -> None:
    plain, model = wrapped_pair(keep, strategy)
    assert torch.equal(model(batch()), plain(batch()))
    with trace.record() as recorder, torch.no_grad():
        assert torch.equal(model.encoder(batch(1)), plain.encoder(batch(1)))
    assert {event.unit for event in recorder.events} == {"encoder.0", "encoder.1"}, "the decoder was left alone"


@pytest.mark.spec("FWD-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_inner_unit_trains_alone_between_steps_of_root(keep: bool, strategy: ShardingStrategy) -> None:
    plain, model = wrapped_pair(keep, strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(4):
        alone = step % 2 == 1
        loss_of((model.encoder if alone else model)(batch(step))).backward()
        for rank in range(2):
            (loss_of((plain.encoder if alone else plain)(batch(step, rank))) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_values(model), named(plain))


# --- a reference that the model keeps ---


class Keeps(nn.Module):
    """Uses a layer's weight through its own reference, which the wrapper cannot detect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].T


@pytest.mark.spec("FWD-03")
@ranks(2)
def test_parameter_in_a_list_of_its_module_has_current_values_and_gets_a_gradient() -> None:
    model = FSDP(seeded(Keeps))
    (flat,) = model.parameters()
    with torch.no_grad():
        flat.zero_()
    output = model(batch())
    assert not output.any()
    output.sum().backward()
    assert flat.grad is not None and flat.grad.any()


@pytest.mark.spec("FWD-03")
@ranks(2)
def test_weight_used_by_its_name_gets_a_gradient() -> None:
    plain = seeded(Keeps)
    plain.forward = lambda x: x @ plain.layer.weight.T  # type: ignore[method-assign]
    model = FSDP(plain)
    loss_of(model(batch())).backward()
    (flat,) = model.parameters()
    assert flat.grad is not None
    assert (flat.grad != 0).any()


# --- the parameters that a module has in forward ---


@pytest.mark.spec("FWD-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.not_simulated("it marks parameters, and the package keeps marks on views")
@ranks(2)
def test_in_forward_and_backward_parameters_are_plain_views_of_one_flat_tensor(
    keep: bool, strategy: ShardingStrategy
) -> None:
    plain = seeded()
    values = named(plain)
    seen: list[str] = []

    def look(moment: str, index: int) -> None:
        layer = blocks[index].linear
        for name, offset in (("weight", 0), ("bias", WIDTH * WIDTH)):
            tensor = getattr(layer, name)
            assert is_plain(tensor), "neither a parameter nor anything else special"
            assert tensor._is_view()
            assert tensor.storage_offset() == offset
            assert torch.equal(tensor, values[f"blocks.{index}.linear.{name}"])
        assert layer.weight.untyped_storage().data_ptr() == layer.bias.untyped_storage().data_ptr()
        assert layer.weight._base is layer.bias._base
        assert layer.weight.requires_grad
        seen.append(f"{moment} {index}")

    def in_forward(index: int, output: Tensor) -> None:
        look("forward", index)
        output.register_hook(lambda _: look("backward", index))

    blocks = list(plain.blocks)
    for index, block in enumerate(blocks):
        block.linear.register_forward_hook(lambda module, args, output, index=index: in_forward(index, output))
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=keep)
    loss_of(model(batch())).backward()
    assert seen == [*(f"forward {index}" for index in range(4)), *(f"backward {index}" for index in (3, 2, 1, 0))]


# --- changes in between ---


def double(layer: nn.Module) -> None:
    """Changes the weight without autograd's knowledge. Otherwise autograd would raise an error in backward."""
    layer.weight.data.mul_(2.0)


@pytest.mark.spec("FWD-05")
@flat_or_original
@ranks(2)
def test_full_shard_drops_param_change_before_backward(keep: bool) -> None:
    plain = seeded()
    model = copy.deepcopy(plain)
    model.blocks[1].linear.register_forward_hook(lambda module, args, output: double(module))
    model = wrapped(model, use_orig_params=keep)
    loss_of(model(batch())).backward()
    assert_same(full_values(model), named(plain), bitwise=True)
    # Backward all-gathers again, so all gradients use the unchanged weight, also those below the changed block.
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    mean = mean_gradients(plain)
    assert_same(full_values(model), {name: value - mean[name] for name, value in named(plain).items()})


@pytest.mark.spec("FWD-05")
@flat_or_original
@ranks(2)
def test_shard_grad_op_drops_param_change_after_backward(keep: bool) -> None:
    plain = seeded()
    model = copy.deepcopy(plain)
    model.blocks[1].linear.register_forward_hook(lambda module, args, output: double(module))
    model = wrapped(model, use_orig_params=keep, sharding_strategy=SHARD_GRAD_OP)
    loss_of(model(batch())).backward()
    assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("FWD-05")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_parameter_change_by_name_after_forward_is_refused(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    loss = loss_of(model(batch()))
    for layer in (model.enter, model.blocks[1].linear):
        with refused(RuntimeError, "summon_full_params"), torch.no_grad():
            layer.weight.mul_(2.0)
        with refused(RuntimeError, "summon_full_params"):
            layer.weight.data.mul_(2.0)
    loss.backward()
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain), 2, dist.get_rank()))


@pytest.mark.spec("FWD-05")
@ranks(2)
def test_change_inside_summon_persists() -> None:
    plain = seeded()
    model = wrapped()
    iterate(model)
    model.zero_grad()
    for each in (model, plain):
        with FSDP.summon_full_params(each), torch.no_grad():
            each.blocks[1].linear.weight.mul_(2.0)
    iterate(model)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain), 2, dist.get_rank()))


# --- several forwards, several backwards ---


def sum_of_losses(model: nn.Module, steps: tuple[int, ...], rank: int | None = None) -> Tensor:
    return torch.stack([loss_of(model(batch(step, rank))) for step in steps]).sum()


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("steps", [(0, 1), (0, 1, 2)])
@ranks(2)
def test_several_forwards_before_one_backward_match_the_reference(
    strategy: ShardingStrategy, steps: tuple[int, ...]
) -> None:
    plain = seeded()
    for model in (wrapped(sharding_strategy=strategy), FSDP(seeded(), sharding_strategy=strategy)):
        loss = sum_of_losses(model, steps)
        assert torch.equal(loss, sum_of_losses(plain, steps))
        loss.backward()
        expected: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for rank in range(2):
            plain.zero_grad()
            sum_of_losses(plain, steps, rank).backward()
            expected = {name: expected[name] + p.grad for name, p in plain.named_parameters()}
        mean = {name: gradient / 2 for name, gradient in expected.items()}
        before = full_values(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert_same(full_values(model), {name: before[name] - mean[name] for name in mean}, bitwise=True)


@pytest.mark.spec("FWD-06")
@ranks(2)
def test_several_forwards_before_one_backward_are_bit_by_bit_those_of_torch() -> None:
    ours, theirs = wrapped(), as_torch(seeded())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(2):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            sum_of_losses(model, (step, step + 5)).backward()
        assert_same(flat_gradients(ours), flat_gradients(theirs), bitwise=True)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.spec("FWD-06")
@ranks(2)
def test_an_evaluation_between_the_forwards_changes_nothing() -> None:
    plain = seeded()
    model = wrapped()
    first = loss_of(model(batch(0)))
    with torch.no_grad():
        model(batch(7))
    (first + loss_of(model(batch(1)))).backward()
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain, [0, 1]), 2, dist.get_rank()))


class Recomputes(Block):
    """Discards its activations and recomputes them in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=self.use_reentrant)


class RecomputesReentrantly(Recomputes):
    """Recomputes in a nested backward, which looks up the parameters by name."""

    use_reentrant = True


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("kind", [Recomputes, RecomputesReentrantly])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_evaluation_before_a_backward_with_recomputation_changes_nothing(
    kind: type[Recomputes], strategy: ShardingStrategy, keep: bool
) -> None:
    plain = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind()))
    model = wrapped(copy.deepcopy(plain), sharding_strategy=strategy, use_orig_params=keep)
    loss = loss_of(model(batch()))
    with torch.no_grad():
        model(batch(7))
    loss.backward()
    mean = mean_gradients(plain)
    before = full_values(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_same(full_values(model), {name: before[name] - mean[name] for name in before})


@pytest.mark.spec("FWD-07")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_accumulation_outside_no_sync_reduces_in_each_backward_and_adds_up_shards(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    parts, index = (1, 0) if strategy is NO_SHARD else (2, dist.get_rank())
    total: dict[str, Tensor] = {}
    for step in range(3):
        with trace.record() as recorder:
            iterate(model, step)
        reduced = sorted(event.unit for event in recorder.events if event.kind in ("RS", "AR"))
        assert reduced == sorted(UNITS), "each unit once in each backward"
        mean = mean_gradients(plain, [step])
        total = {name: total[name] + mean[name] for name in mean} if total else mean
        assert_same(flat_gradients(model), chunked(plain, total, parts, index), bitwise=True)
        for parameter in flat_parameters(model).values():
            assert parameter.grad.shape == parameter.shape


@pytest.mark.spec("FWD-07")
@ranks(2)
def test_accumulation_outside_no_sync_is_bit_by_bit_that_of_torch() -> None:
    ours, theirs = wrapped(), as_torch(seeded(), sharding_strategy=torch_fsdp.ShardingStrategy.FULL_SHARD)
    for step in range(3):
        for model in (ours, theirs):
            iterate(model, step)
        assert_same(flat_gradients(ours), flat_gradients(theirs), bitwise=True)


@pytest.mark.spec("FWD-08")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_zero_grad_clears_the_gradients_of_every_unit(keep: bool, strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for clear in (model.zero_grad, optimizer.zero_grad):
        iterate(model, 5)
        assert any(parameter.grad is not None for parameter in model.parameters())
        clear(set_to_none=True)
        assert [parameter.grad for parameter in model.parameters()] == [None] * len(list(model.parameters()))
    optimizer.step()
    assert_same(full_values(model), named(plain), bitwise=True)
    # No other gradients remain: the next gradient is that of the next batch alone.
    iterate(model)
    optimizer.step()
    mean = mean_gradients(plain)
    assert_same(full_values(model), {name: value - mean[name] for name, value in named(plain).items()})


@pytest.mark.spec("FWD-08")
@ranks(2)
def test_zero_grad_clears_unreduced_gradients_of_no_sync() -> None:
    plain = seeded()
    model = wrapped()
    with model.no_sync():
        iterate(model, 5)
    model.zero_grad(set_to_none=True)
    assert flat_gradients(model) == {}
    iterate(model)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain), 2, dist.get_rank()))
    model.zero_grad(set_to_none=False)
    assert all(not gradient.any() for gradient in flat_gradients(model).values())
    assert local_gradients(plain, [0], 0), "while a plain model has some"


@pytest.mark.spec("FWD-08")
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_zero_grad_before_backward_reaches_unsharded_units(
    keep: bool, strategy: ShardingStrategy, set_to_none: bool
) -> None:
    """At this time, modules have unsharded parameters, and the optimizer's parameters have the gradients."""
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    owned = list(model.parameters())
    iterate(model, 5)
    loss = loss_of(model(batch()))
    model.zero_grad(set_to_none=set_to_none)
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in owned)
    loss.backward()
    torch.optim.SGD(owned, lr=1.0).step()
    mean = mean_gradients(plain)
    assert_same(full_values(model), {name: value - mean[name] for name, value in named(plain).items()})


@pytest.mark.spec("FWD-08", "NOSYNC-10")
@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_zero_grad_with_set_to_none_false_also_clears_the_stored_reduced_gradient(
    keep: bool, strategy: ShardingStrategy, by_optimizer: bool
) -> None:
    """While ``.grad`` has an unreduced gradient, the unit stores the reduced one, which must become 0 as well."""
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    iterate(model, 5)
    with model.no_sync():
        iterate(model, 6)
    (optimizer if by_optimizer else model).zero_grad(set_to_none=False)
    shown = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert shown and not any(gradient.any() for gradient in shown)
    iterate(model)
    optimizer.step()
    mean = mean_gradients(plain)
    assert_same(full_values(model), {name: value - mean[name] for name, value in named(plain).items()})
    # Check again when all gradients are in `.grad`.
    optimizer.zero_grad(set_to_none=False)
    before = full_values(model)
    optimizer.step()
    assert_same(full_values(model), before, bitwise=True)
