"""Communication hooks: user code that reduces the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from spec_tests.harness import ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import seeded
from spec_tests.models.whole import odd
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
# Each strategy, and both kinds of parameters.
some_settings = apis.settings_of(
    (apis.WRAPPED, FULL_SHARD), (apis.ORIGINALS, SHARD_GRAD_OP), (apis.ORIGINALS, NO_SHARD), (apis.WRAPPED, NO_SHARD)
)
# Backward reaches the blocks from the last to the first, and the root at the end.
UNITS = ("blocks.3", "blocks.2", "blocks.1", "blocks.0", "")
# torch 2.13 renamed this function and warns about the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def note_and_fill(state: list[Any], *arguments: Tensor) -> None:
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
@some_settings
@ranks(2)
def test_the_hook_combines_the_gradients_of_all_units_in_every_iteration(api: Any, strategy: Any) -> None:
    model, seen = api.shard(strategy=strategy), list[Any]()
    assert model.register_comm_hook(seen, note_and_fill) is None
    with running.Wire() as wire:
        for step in range(3):
            running.iterate(model, step)
    assert not {"RS", "AR"} & set(wire.kinds()), "only the hook communicates gradients"
    assert len(seen) == 3 * len(UNITS)
    gradients = api.gradients(model)
    assert gradients.keys() == dict(seeded().named_parameters()).keys()
    assert all((gradient == 15.0).all() for gradient in gradients.values()), "gradients accumulate"


# --- the hook's arguments ---


@pytest.mark.spec("HOOK-02", "HOOK-04")
@apis.settings_of((apis.WRAPPED, FULL_SHARD), (apis.ORIGINALS, SHARD_GRAD_OP))
@ranks(2)
def test_comm_hook_of_a_sharded_unit_gets_the_padded_unsharded_gradient_and_an_output_shard(
    api: Any, strategy: Any
) -> None:
    plain, model, seen = seeded(odd), api.shard(seeded(odd), strategy=strategy), list[Any]()
    model.register_comm_hook(seen, note_and_fill)
    running.iterate(model)
    rows = values.flattened(plain, values.local_gradients(plain, [0], dist.get_rank()))
    assert any(row.numel() % 2 for row in rows.values())
    for unit, (grad, out) in zip(UNITS, seen, strict=True):
        size = rows[unit].numel()
        assert grad.shape == (size + size % 2,), "padded to a multiple of the number of ranks"
        assert out.shape == (grad.numel() // 2,)
        assert torch.equal(grad[:size], rows[unit]), "this rank's own gradient, undivided"
        assert not grad[size:].any()
        assert (out.dtype, out.device) == (grad.dtype, grad.device)


@pytest.mark.spec("HOOK-03", "HOOK-04")
@pytest.mark.parametrize("is_alone", [False, True], ids=["NO_SHARD", "a group of one rank"])
@apis.wrapper_apis
@ranks(2)
def test_comm_hook_of_an_unsharded_unit_changes_the_gradient_in_place(api: Any, is_alone: bool) -> None:
    plain, seen = seeded(odd), list[Tensor]()

    def double(state: None, *arguments: Tensor) -> None:
        (grad,) = arguments
        seen.append(grad.clone())
        grad.mul_(2.0)

    own_group, _ = dist.new_subgroups(group_size=1)
    options = {"process_group": own_group} if is_alone else {}
    model = api.shard(seeded(odd), strategy=NO_SHARD, **options)
    model.register_comm_hook(None, double)
    running.iterate(model)
    mine = values.local_gradients(plain, [0], dist.get_rank())
    rows = values.flattened(plain, mine)
    for unit, grad in zip(UNITS, seen, strict=True):
        assert torch.equal(grad.reshape(-1), rows[unit])
    expected = {name: 2.0 * gradient for name, gradient in mine.items()}
    values.assert_same(api.gradients(model), expected, bitwise=True)


@pytest.mark.spec("HOOK-02")
@ranks(2)
def test_hook_gets_gradients_in_the_dtype_of_the_reduction() -> None:
    model = apis.WRAPPED.shard(precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16})
    seen: list[Any] = []
    model.register_comm_hook(seen, note_and_fill)
    running.iterate(model)
    assert {tensor.dtype for call in seen for tensor in call} == {torch.float16}
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, 5.0))


@pytest.mark.spec("HOOK-02")
@some_settings
@ranks(2)
def test_comm_hook_is_not_called_inside_no_sync_and_gets_the_sum_afterwards(api: Any, strategy: Any) -> None:
    plain, model, seen = seeded(), api.shard(strategy=strategy), list[Any]()
    model.register_comm_hook(seen, note_and_fill)
    with model.no_sync():
        running.iterate(model, 0)
    assert seen == []
    running.iterate(model, 1)
    rows = values.flattened(plain, values.local_gradients(plain, [0, 1], dist.get_rank()))
    for unit, (grad, *_) in zip(UNITS, seen, strict=True):
        torch.testing.assert_close(grad.reshape(-1), rows[unit])


@pytest.mark.spec("HOOK-05")
@some_settings
@ranks(2)
def test_comm_hook_state_is_the_same_object_and_stays_on_its_rank(api: Any, strategy: Any) -> None:
    model, without_hook = api.shard(strategy=strategy), api.shard(strategy=strategy)
    seen: list[int] = []

    def count(state: list[int], *arguments: Tensor) -> None:
        assert state is seen
        state.append(dist.get_rank())
        average(torch.float32, *arguments)

    with running.Wire() as wire:
        model.register_comm_hook(seen, count)
        assert wire.sent == []
        running.iterate(model)
    with running.Wire() as other_wire:
        running.iterate(without_hook)
    assert wire.sent == other_wire.sent, "the hook's own reductions replace the others"
    assert seen == [dist.get_rank()] * len(UNITS)


# --- hooks that users write ---


@pytest.mark.spec("HOOK-06", "HOOK-07")
@some_settings
@ranks(2)
def test_a_hook_that_averages_gives_the_default_result_and_a_compressing_one_a_rounded_result(
    api: Any, strategy: Any
) -> None:
    of_torch = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
    found, expected = [], values.mean_gradients(seeded())
    for state, hook in (
        (default_hooks.DefaultState(dist.group.WORLD), of_torch),
        (torch.float32, average),
        (torch.bfloat16, average),
    ):
        model = api.shard(strategy=strategy)
        model.register_comm_hook(state, hook)
        running.iterate(model)
        found.append(api.gradients(model))
    values.assert_same(found[0], expected, bitwise=True)
    values.assert_same(found[1], expected, bitwise=True)
    for name, gradient in found[2].items():
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

    model = apis.ORIGINALS.shard(strategy=NO_SHARD)
    model.register_comm_hook(pairs, average_with_partner)
    rank = dist.get_rank()
    for step, (pairs["group"], partner) in enumerate([(neighbours, rank ^ 1), (across, rank ^ 2)]):
        model.zero_grad()
        running.iterate(model, step)
        mine, theirs = (values.local_gradients(seeded(), [step], one) for one in (rank, partner))
        expected = {name: (mine[name] + theirs[name]) / 2 for name in mine}
        values.assert_same(apis.ORIGINALS.gradients(model), expected, bitwise=True)


# --- errors ---


@pytest.mark.spec("HOOK-08")
@apis.wrapper_apis
@ranks(2)
def test_a_second_registration_is_refused_also_after_a_forward_and_the_first_hook_stays(api: Any) -> None:
    model, seen = api.shard(), list[Any]()
    model.register_comm_hook(seen, note_and_fill)
    for num_before in range(2):
        with pytest.raises(AssertionError, match=rf"rank {dist.get_rank()}.*already registered"):
            model.register_comm_hook(None, average)
        running.iterate(model)
        assert len(seen) == (1 + num_before) * len(UNITS)


@pytest.mark.spec("HOOK-08")
@ranks(2)
def test_a_hook_for_a_larger_model_is_refused_if_an_inner_unit_already_has_one() -> None:
    inner, seen = apis.WRAPPED.shard(), list[Any]()
    inner.register_comm_hook(seen, note_and_fill)
    model = FullyShardedDataParallel(nn.Sequential(seeded(lambda: nn.Linear(6, 6)), inner))
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(None, average)
    running.iterate(model)
    assert len(seen) == len(UNITS)


@pytest.mark.spec("HOOK-09")
@pytest.mark.parametrize("evaluates", [False, True])
@apis.wrapper_apis
@ranks(2)
def test_comm_hook_must_be_registered_before_the_first_forward(api: Any, evaluates: bool) -> None:
    model, seen = api.shard(), list[Any]()
    with torch.set_grad_enabled(not evaluates):
        model(running.batch())
    with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}.*after the first forward"):
        model.register_comm_hook(seen, note_and_fill)
    running.iterate(model)
    assert seen == []


@pytest.mark.spec("HOOK-10")
@apis.wrapper_apis
@ranks(2)
def test_a_hook_must_be_callable_and_belong_to_the_root(api: Any) -> None:
    model, seen = api.shard(), list[Any]()
    for hook in (None, 3, "average"):
        with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}.*callable"):
            model.register_comm_hook(None, hook)
    for _ in range(2):
        with pytest.raises(AssertionError, match=rf"rank {dist.get_rank()}.*root"):
            model.blocks[1].register_comm_hook(seen, note_and_fill)
        running.iterate(model)
    assert seen == []


@pytest.mark.spec("HOOK-10")
@pytest.mark.parametrize("strategy", [HYBRID_SHARD, HYBRID_SHARD_ZERO2])
@ranks(2)
def test_hybrid_strategies_take_no_hook_except_without_shards(strategy: ShardingStrategy) -> None:
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1]])

    def hybrid(module: nn.Module, *groups: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, sharding_strategy=strategy, process_group=groups)

    around_hybrid, seen = seeded(), list[Any]()
    around_hybrid.blocks[0] = hybrid(around_hybrid.blocks[0], dist.group.WORLD, alone)
    for model in (hybrid(seeded(), dist.group.WORLD, alone), FullyShardedDataParallel(around_hybrid)):
        with pytest.raises(AssertionError, match=rf"rank {dist.get_rank()}.*hybrid"):
            model.register_comm_hook(seen, note_and_fill)
        running.iterate(model)
    assert seen == []
    # The strategy falls back to NO_SHARD, with a warning (CTOR-18).
    hybrid(seeded(), alone, dist.group.WORLD).register_comm_hook(None, average)
