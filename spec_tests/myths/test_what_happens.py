"""Claims about the events of a step, and their order."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Stack, Twice, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.subject import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    trace,
)

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


def from_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.spec("MYTH-06")
@ranks(2)
def test_every_rank_stores_a_shard_of_every_unit() -> None:
    sizes = from_all_ranks([p.numel() for p in wrapped().parameters()])
    assert sizes[0] == sizes[1] == [28, 21, 21, 21, 21]


@pytest.mark.spec("MYTH-07")
@ranks(2)
def test_each_rank_computes_full_layers_on_its_own_batch() -> None:
    model = wrapped()
    seen: list[torch.Tensor] = []
    model.module.blocks[0].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    with trace.record() as recorder:
        iterate(model)
    first, second = from_all_ranks(seen[0].cpu())
    assert first.shape == second.shape == (3, 6)
    assert not torch.equal(first, second)
    assert {event.kind for event in recorder.events if event.ranks} == {"AG", "RS"}


@pytest.mark.spec("MYTH-08", "MYTH-27")
@ranks(2)
def test_all_ranks_communicate_equally_and_own_no_layer() -> None:
    model = wrapped()
    iterate(model)
    with trace.record() as recorder:
        iterate(model)
    sent = [(e.kind, e.unit, e.num_bytes) for e in recorder.events if e.ranks]
    assert from_all_ranks(sent)[0] == from_all_ranks(sent)[1]
    kinds = {kind for kind, _, _ in sent}
    assert kinds == {"AG", "RS"}


@pytest.mark.spec("MYTH-18")
@ranks(2)
def test_units_are_reduced_during_backward_and_not_after_it() -> None:
    model = wrapped()
    with trace.record() as recorder:
        iterate(model)
    order = recorder.order("B", "RS")
    assert order.index("RS blocks.1") < order.index("B blocks.0")


@pytest.mark.spec("MYTH-19")
@ranks(2)
def test_all_gather_count_depends_on_strategy_and_position() -> None:
    counts = {}
    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        model = wrapped(sharding_strategy=strategy)
        with trace.record() as recorder:
            iterate(model)
        gathers = recorder.order("AG")
        counts[strategy] = gathers.count("AG blocks.0"), gathers.count("AG")
    assert counts == {FULL_SHARD: (2, 1), SHARD_GRAD_OP: (1, 1)}


@pytest.mark.spec("MYTH-20")
@ranks(2)
def test_block_is_all_gathered_for_each_of_two_calls() -> None:
    model = wrapped(seeded(lambda: Twice([Block()])))
    with trace.record() as recorder:
        model(batch()).sum().backward()
    assert recorder.count("AG") == 3


@pytest.mark.spec("MYTH-23")
@ranks(2)
def test_fsdp_is_a_layer_above_a_backend() -> None:
    assert dist.get_backend() in ("gloo", "nccl", "simulated")
    assert "fsdp" not in dist.Backend.backend_list
    output = wrapped()(batch())
    loss_of(output).backward()
    assert output.shape == (3, 2)


@pytest.mark.spec("MYTH-29")
@ranks(2)
def test_an_optimizer_from_before_the_wrapping_changes_nothing() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = wrapped(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="were replaced when the model was sharded"):
        iterate(model, optimizer=optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.spec("MYTH-32")
@ranks(2)
def test_norm_of_torch_differs_between_ranks_and_the_norm_of_the_method_does_not() -> None:
    model = wrapped()
    iterate(model)
    local = from_all_ranks(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    true = from_all_ranks(float(model.clip_grad_norm_(1e9)))
    assert local[0] != local[1]
    assert true[0] == true[1] == pytest.approx((local[0] ** 2 + local[1] ** 2) ** 0.5)


@pytest.mark.spec("MYTH-05", "MYTH-33")
@ranks(2)
def test_no_sync_skips_the_reduce_scatter_and_keeps_gradients_in_full_size() -> None:
    model = wrapped()
    with trace.record() as recorder, model.no_sync():
        iterate(model)
    assert recorder.count("RS") == recorder.count("AR") == 0
    assert recorder.count("AG") > 0
    kept = sum(p.grad.numel() for p in model.parameters())
    assert kept == 2 * sum(p.numel() for p in model.parameters())
    iterate(model)


@pytest.mark.spec("MYTH-52")
@ranks(2)
def test_accumulating_without_no_sync_gives_the_same_gradient() -> None:
    plain, quiet = wrapped(), wrapped()
    for _ in range(2):
        iterate(plain)
    with quiet.no_sync():
        iterate(quiet)
    iterate(quiet)
    for one, other in zip(plain.parameters(), quiet.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.spec("MYTH-49", "MYTH-66", "MYTH-70")
@ranks(2)
def test_mixed_precision_casts_automatically_and_reduce_dtype_defaults_to_param_dtype() -> None:
    narrow, wide = torch.bfloat16, torch.float32
    for policy, compute, travel in [
        (MixedPrecision(param_dtype=narrow), narrow, narrow),
        (MixedPrecision(reduce_dtype=wide), wide, wide),
        (MixedPrecision(param_dtype=narrow, reduce_dtype=wide), narrow, wide),
    ]:
        model = wrapped(mixed_precision=policy)
        seen = []
        model.module.blocks[0].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        with trace.record() as recorder:
            iterate(model)
        assert seen == [compute]
        assert {event.dtype for event in recorder.events if event.kind == "RS"} == {travel}


@pytest.mark.spec("MYTH-53")
@ranks(2)
def test_unwrapped_part_is_not_synchronized() -> None:
    model = seeded()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_id=device())
    iterate(model)
    first, second = from_all_ranks(model.leave.weight.grad.cpu())
    assert not torch.equal(first, second)


@pytest.mark.spec("MYTH-55")
@ranks(2)
def test_fully_shard_manages_parameters_without_inner_call() -> None:
    model = seeded()
    fully_shard(model.blocks[0])
    inner = model.blocks[0].linear.weight
    fully_shard(model)
    assert model.blocks[0].linear.weight is inner
    assert model.leave.weight.device.type == device().type


@pytest.mark.spec("MYTH-56")
@ranks(2)
def test_root_is_kept_after_forward() -> None:
    model = sharded()
    with trace.record() as recorder:
        model(batch())
    assert recorder.order("FREE") == [f"FREE blocks.{index}" for index in range(4)]


@pytest.mark.spec("MYTH-57", "MYTH-62")
@ranks(2)
def test_apis_give_different_types_and_cannot_be_mixed() -> None:
    from torch.distributed.tensor import DTensor

    flat, each = list(wrapped().parameters()), list(sharded().parameters())
    assert all(p.dim() == 1 and not isinstance(p, DTensor) for p in flat)
    assert all(isinstance(p, DTensor) for p in each)
    assert (len(flat), len(each)) == (5, 12)
    model = seeded()
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="already sharded by fully_shard"):
        FullyShardedDataParallel(model, device_id=device())


@pytest.mark.spec("MYTH-59")
@ranks(2)
def test_the_optimizers_step_sends_nothing() -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    iterate(model)
    with trace.record() as recorder:
        optimizer.step()
    assert recorder.events == []


@pytest.mark.spec("MYTH-64")
@ranks(2)
def test_forward_prefetch_begins_with_the_second_iteration() -> None:
    model = wrapped(forward_prefetch=True)
    orders = []
    for _ in range(2):
        with trace.record() as recorder:
            iterate(model)
        orders.append(recorder.order("AG", "F"))
    early = [order.index("AG blocks.1") < order.index("F blocks.0") for order in orders]
    assert early == [False, True]


@pytest.mark.spec("MYTH-63")
@ranks(2)
def test_pre_prefetches_before_gradients_and_post_after() -> None:
    for prefetch, is_before in [(BackwardPrefetch.BACKWARD_PRE, True), (BackwardPrefetch.BACKWARD_POST, False)]:
        model = wrapped(backward_prefetch=prefetch)
        with trace.record() as recorder:
            iterate(model)
        order = recorder.order("AG", "FREE")
        last = len(order) - 1 - order[::-1].index("AG blocks.0")
        freed = len(order) - 1 - order[::-1].index("FREE blocks.1")
        assert (last < freed) is is_before


@pytest.mark.spec("MYTH-76")
@ranks(2)
def test_same_learning_rate_gives_the_result_of_one_process() -> None:
    model = wrapped(sharding_strategy=FULL_SHARD)
    iterate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    alone = seeded()
    batches = from_all_ranks(batch().cpu())
    loss = sum(alone(x.to(device())).square().mean() for x in batches) / 2
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach())


@pytest.mark.spec("MYTH-51")
@ranks(2)
def test_parameter_has_no_sharded_attribute() -> None:
    assert not any(hasattr(p, "_sharded") for p in [*wrapped().parameters(), *sharded().parameters()])


@pytest.mark.spec("MYTH-01")
@ranks(2)
def test_module_may_be_on_the_device_or_use_device_id_or_param_init_fn() -> None:
    with torch.device("meta"):
        empty = Stack()

    full, places = seeded(), dict(empty.named_modules())

    def fill(module: nn.Module) -> None:
        for name, like in full.named_modules():
            if places.get(name) is module and list(module.parameters(recurse=False)):
                module.to_empty(device=device(), recurse=False)
                module.load_state_dict(like.state_dict())

    outputs = []
    for model in (wrapped(device_id=device()), wrapped(), wrapped(empty, param_init_fn=fill, device_id=device())):
        outputs.append(model(batch()))
        loss_of(outputs[-1]).backward()
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.spec("MYTH-58")
@pytest.mark.proof("arithmetic")
def test_placements_are_imported_from_the_public_place() -> None:
    from torch.distributed.tensor import Replicate, Shard

    assert re.fullmatch(r"Shard\(dim=0\)|S\(0\)", repr(Shard(0)))
    assert Replicate() == copy.copy(Replicate())
    with pytest.raises(ImportError, match="placement_specs"):
        import torch.distributed._tensor.placement_specs  # type: ignore[import-not-found]  # noqa: F401
