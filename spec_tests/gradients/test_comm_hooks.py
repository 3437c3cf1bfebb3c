"""Communication hooks: user code that reduces the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.apis import ORIGINALS, WRAPPED, Api, wrapper_apis, wrapper_settings
from spec_tests.models.modules import UNITS, WIDTH, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, HYBRID_STRATEGIES, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, flattened, local_gradients, mean_gradients
from spec_tests.models.whole import odd, whole
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

sharding = pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
# Backward reaches the blocks from the last to the first, and the root at the end.
ORDER = UNITS[::-1]
# torch 2.13 renamed this function and warns about the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Calls = list[tuple[Tensor, ...]]


def note_and_fill(state: Calls, *arguments: Tensor) -> None:
    """Records its arguments and sets the gradient to 5 everywhere."""
    state.append(tuple(tensor.clone() for tensor in arguments))
    # The output shard, or the gradient of a unit that is not sharded.
    arguments[-1].fill_(5.0)


def average(dtype: torch.dtype, grad: Tensor, out: Tensor | None = None) -> None:
    """Does the same as FSDP without a hook, but sends the gradients in the dtype that is the state of the hook."""
    sent = grad.to(dtype)
    if out is None:
        dist.all_reduce(sent)
        grad.copy_(sent / dist.get_world_size())
    else:
        local_shard = sent.new_empty(out.shape)
        reduce_scatter(local_shard, sent)
        out.copy_(local_shard / dist.get_world_size())


# --- the reduction that a hook replaces ---


@pytest.mark.spec("HOOK-01")
@wrapper_settings
@ranks(2)
def test_the_hook_combines_the_gradients_of_all_units_in_every_iteration(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    seen: Calls = []
    assert model.register_comm_hook(seen, note_and_fill) is None
    with Wire() as wire:
        for step in range(3):
            iterate(model, step)
    assert not {"RS", "AR"} & set(wire.kinds()), "only the hook communicates gradients"
    assert len(seen) == 3 * len(UNITS)
    gradients = api.gradients(model)
    assert gradients.keys() == dict(seeded().named_parameters()).keys()
    assert all((gradient == 15.0).all() for gradient in gradients.values()), "gradients accumulate"


# --- the hook's arguments ---


@pytest.mark.spec("HOOK-02", "HOOK-04")
@sharding
@wrapper_apis
@ranks(2)
def test_comm_hook_of_a_sharded_unit_gets_the_padded_unsharded_gradient_and_an_output_shard(
    api: Api, strategy: ShardingStrategy
) -> None:
    plain, model = seeded(odd), api.shard(seeded(odd), strategy=strategy)
    seen: Calls = []
    model.register_comm_hook(seen, note_and_fill)
    iterate(model)
    rows = flattened(plain, local_gradients(plain, [0], dist.get_rank()))
    assert any(row.numel() % 2 for row in rows.values())
    for unit, (grad, out) in zip(ORDER, seen, strict=True):
        size = rows[unit].numel()
        assert grad.shape == (size + size % 2,), "padded to a multiple of the number of ranks"
        assert out.shape == (grad.numel() // 2,)
        assert torch.equal(grad[:size], rows[unit]), "this rank's own gradient, undivided"
        assert not grad[size:].any()
        assert (out.dtype, out.device) == (grad.dtype, grad.device)


@pytest.mark.spec("HOOK-02")
@sharding
@ranks(4)
def test_each_rank_fills_its_own_shard(strategy: ShardingStrategy) -> None:
    model = WRAPPED.shard(seeded(odd), strategy=strategy)

    def pick(state: None, grad: Tensor, out: Tensor) -> None:
        out.copy_(grad.chunk(4)[dist.get_rank()])

    model.register_comm_hook(None, pick)
    loss_of(model(batch(0, 0))).backward()
    assert_same(WRAPPED.gradients(model), local_gradients(seeded(odd), [0], 0), bitwise=True)


@pytest.mark.spec("HOOK-03", "HOOK-04")
@pytest.mark.parametrize("is_alone", [False, True], ids=["NO_SHARD", "a group of one rank"])
@wrapper_apis
@ranks(2)
def test_comm_hook_of_an_unsharded_unit_changes_the_gradient_in_place(api: Api, is_alone: bool) -> None:
    plain, seen = seeded(odd), list[Tensor]()

    def double(state: None, *arguments: Tensor) -> None:
        (grad,) = arguments
        seen.append(grad.clone())
        grad.mul_(2.0)

    own_group, _ = dist.new_subgroups(group_size=1)
    options = {"process_group": own_group} if is_alone else {"strategy": NO_SHARD}
    model = api.shard(seeded(odd), **options)
    model.register_comm_hook(None, double)
    iterate(model)
    mine = local_gradients(plain, [0], dist.get_rank())
    rows = flattened(plain, mine)
    for unit, grad in zip(ORDER, seen, strict=True):
        assert torch.equal(grad.reshape(-1), rows[unit])
    gradients = whole(model, odd, group="nobody")[1]
    assert_same(gradients, {name: 2.0 * gradient for name, gradient in mine.items()}, bitwise=True)


@pytest.mark.spec("HOOK-02")
@sharding
@ranks(2)
def test_hook_gets_gradients_in_the_dtype_of_the_reduction(strategy: ShardingStrategy) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}
    model = WRAPPED.shard(strategy=strategy, precision=precision)
    seen: Calls = []
    model.register_comm_hook(seen, note_and_fill)
    iterate(model)
    assert {tensor.dtype for call in seen for tensor in call} == {torch.float16}
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, 5.0))


@pytest.mark.spec("HOOK-02")
@wrapper_settings
@ranks(2)
def test_comm_hook_is_not_called_inside_no_sync_and_gets_the_sum_afterwards(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    seen: Calls = []
    model.register_comm_hook(seen, note_and_fill)
    with model.no_sync():
        iterate(model, 0)
    assert seen == []
    iterate(model, 1)
    rows = flattened(plain, local_gradients(plain, [0, 1], dist.get_rank()))
    for unit, (grad, *_) in zip(ORDER, seen, strict=True):
        torch.testing.assert_close(grad.reshape(-1), rows[unit])


@pytest.mark.spec("HOOK-05")
@wrapper_settings
@ranks(2)
def test_comm_hook_state_is_the_same_object_and_stays_on_its_rank(api: Api, strategy: Any) -> None:
    model, without_hook = api.shard(strategy=strategy), api.shard(strategy=strategy)
    seen: list[int] = []

    def count(state: list[int], *arguments: Tensor) -> None:
        assert state is seen
        state.append(dist.get_rank())
        average(torch.float32, *arguments)

    with Wire() as wire:
        model.register_comm_hook(seen, count)
        assert wire.sent == []
        iterate(model)
    with Wire() as other_wire:
        iterate(without_hook)
    assert wire.sent == other_wire.sent, "the hook's own reductions replace the others"
    assert seen == [dist.get_rank()] * len(UNITS)


# --- hooks that users write ---


@pytest.mark.spec("HOOK-06")
@pytest.mark.parametrize("is_of_torch", [False, True])
@wrapper_settings
@ranks(2)
def test_a_hook_that_averages_gives_the_default_result(api: Api, strategy: Any, is_of_torch: bool) -> None:
    model = api.shard(strategy=strategy)
    if is_of_torch:
        hook = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    else:
        model.register_comm_hook(torch.float32, average)
    iterate(model)
    assert_same(api.gradients(model), mean_gradients(seeded()), bitwise=True)


@pytest.mark.spec("HOOK-07")
@wrapper_settings
@ranks(2)
def test_a_compressing_hook_reduces_in_low_precision(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    model.register_comm_hook(torch.bfloat16, average)
    iterate(model)
    gradients, expected = api.gradients(model), mean_gradients(seeded())
    for name, gradient in gradients.items():
        # The gradients are stored in float32, but bfloat16 can represent them.
        assert gradient.dtype is torch.float32
        assert torch.equal(gradient.bfloat16().float(), gradient)
        # Each gradient of a rank and the sum are rounded. A sum can be smaller than its terms.
        torch.testing.assert_close(gradient, expected[name], rtol=0.0, atol=2**-7 * float(expected[name].abs().max()))


@pytest.mark.spec("HOOK-03", "HOOK-07")
@ranks(4)
def test_a_gossiping_hook_averages_with_another_partner_in_each_iteration() -> None:
    neighbours, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    pairs = {"group": neighbours}

    def average_with_partner(state: dict[str, Any], grad: Tensor) -> None:
        reduced = grad.clone()
        dist.all_reduce(reduced, group=state["group"])
        # A hook may also replace the memory of the gradient.
        grad.data = reduced / 2.0

    model = ORIGINALS.shard(strategy=NO_SHARD)
    model.register_comm_hook(pairs, average_with_partner)
    rank = dist.get_rank()
    for step, (pairs["group"], partner) in enumerate([(neighbours, rank ^ 1), (across, rank ^ 2)]):
        model.zero_grad()
        iterate(model, step)
        mine, theirs = (local_gradients(seeded(), [step], one) for one in (rank, partner))
        expected = {name: (mine[name] + theirs[name]) / 2 for name in mine}
        assert_same(ORIGINALS.gradients(model), expected, bitwise=True)


# --- errors ---


@pytest.mark.spec("HOOK-08")
@wrapper_settings
@ranks(2)
def test_a_second_registration_is_refused_also_after_a_forward_and_the_first_hook_stays(
    api: Api, strategy: Any
) -> None:
    model = api.shard(strategy=strategy)
    seen: Calls = []
    model.register_comm_hook(seen, note_and_fill)
    for num_before in range(2):
        with pytest.raises(AssertionError, match=rf"rank {dist.get_rank()}.*already registered"):
            model.register_comm_hook(None, average)
        iterate(model)
        assert len(seen) == (1 + num_before) * len(UNITS)


@pytest.mark.spec("HOOK-08")
@ranks(2)
def test_a_hook_for_a_larger_model_is_refused_if_an_inner_unit_already_has_one() -> None:
    inner = wrapped()
    seen: Calls = []
    inner.register_comm_hook(seen, note_and_fill)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner).to(device()))
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(None, average)
    iterate(model)
    assert len(seen) == len(UNITS)


@pytest.mark.spec("HOOK-09")
@pytest.mark.parametrize("evaluates", [False, True])
@wrapper_settings
@ranks(2)
def test_comm_hook_must_be_registered_before_the_first_forward(api: Api, strategy: Any, evaluates: bool) -> None:
    model = api.shard(strategy=strategy)
    with torch.set_grad_enabled(not evaluates):
        model(batch())
    seen: Calls = []
    with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}.*after the first forward"):
        model.register_comm_hook(seen, note_and_fill)
    iterate(model)
    assert seen == []


@pytest.mark.spec("HOOK-10")
@wrapper_settings
@ranks(2)
def test_a_hook_must_be_callable_and_belong_to_the_root(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    for hook in (None, 3, "average"):
        with refused(ValueError, "callable"):
            model.register_comm_hook(None, hook)
    seen: Calls = []
    for _ in range(2):
        with refused(AssertionError, "root"):
            model.blocks[1].register_comm_hook(seen, note_and_fill)
        iterate(model)
    assert seen == []


@pytest.mark.spec("HOOK-10")
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(2)
def test_hybrid_strategies_take_no_hook_except_without_shards(strategy: ShardingStrategy) -> None:
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1]])

    def hybrid(module: nn.Module, *groups: dist.ProcessGroup) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, sharding_strategy=strategy, process_group=groups)

    around_hybrid = seeded()
    around_hybrid.blocks[0] = hybrid(around_hybrid.blocks[0], dist.group.WORLD, alone)
    for model in (hybrid(seeded(), dist.group.WORLD, alone), FullyShardedDataParallel(around_hybrid)):
        with refused(AssertionError, "hybrid"):
            model.register_comm_hook([], note_and_fill)
    # The strategy falls back to NO_SHARD, with a warning (CTOR-18).
    hybrid(seeded(), alone, dist.group.WORLD).register_comm_hook(None, average)


@pytest.mark.spec("HOOK-10")
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_hybrid_strategies_with_replicas_take_no_hook(strategy: ShardingStrategy) -> None:
    model = WRAPPED.shard(strategy=strategy)
    seen: Calls = []
    with pytest.raises(AssertionError, match=rf"rank {dist.get_rank()}.*hybrid"):
        model.register_comm_hook(seen, note_and_fill)
    iterate(model)
    assert seen == []
