"""``clip_grad_norm_``: clips by the norm of all gradients.

The expected norm is that of the unwrapped model's gradients, averaged over the ranks' batches and concatenated.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Tied, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_STRATEGIES, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, local_gradients, mean_gradients
from spec_tests.models.whole import by_name, group_of, whole
from spec_tests.oracles.tolerance import tolerance
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

either = pytest.mark.parametrize("use_orig_params", [False, True])
NORM_TYPES = (1, 2.0, 3, math.inf, "inf")


def norm_of(gradients: dict[str, Tensor], norm_type: float | str = 2.0) -> Tensor:
    """The p-norm of all gradients as one vector, computed in float64."""
    row = torch.cat([gradient.reshape(-1).double() for gradient in gradients.values()])
    return torch.linalg.vector_norm(row, float(norm_type)).float().cpu()


def of_all_ranks(mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


# --- arguments ---


@pytest.mark.spec("CLIP-01")
@pytest.mark.pure
def test_the_signature_is_that_of_torch() -> None:
    for library in (FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel):
        parameters = inspect.signature(library.clip_grad_norm_).parameters
        assert [(p.name, p.default) for p in parameters.values()][1:] == [
            ("max_norm", inspect.Parameter.empty),
            ("norm_type", 2.0),
        ]


@pytest.mark.spec("CLIP-01")
@ranks(2)
def test_max_norm_accepts_int_and_norm_type_accepts_string() -> None:
    model = wrapped()
    iterate(model)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    default = model.clip_grad_norm_(1000.0)
    for max_norm in (1000, 1000.0):
        for norm_type in (2, 2.0, "2", "2.0"):
            assert model.clip_grad_norm_(max_norm, norm_type) == default
            assert model.clip_grad_norm_(max_norm=max_norm, norm_type=norm_type) == default
        assert model.clip_grad_norm_(max_norm, "inf") == model.clip_grad_norm_(max_norm, math.inf)
    assert_same({name: p.grad for name, p in model.named_parameters()}, before, bitwise=True)


# --- the norm ---


@pytest.mark.spec("CLIP-02", "CLIP-03")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_norm_and_clipped_gradients_are_those_of_one_process(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    group = model.process_group if strategy in HYBRID_STRATEGIES else group_of(strategy)
    for step, norm_type in enumerate(NORM_TYPES):
        model.zero_grad()
        iterate(model, step)
        expected = mean_gradients(seeded(), [step])
        norm = norm_of(expected, norm_type)
        for max_norm in (2.0 * float(norm), 0.25 * float(norm)):
            returned = model.clip_grad_norm_(max_norm, norm_type)
            assert isinstance(returned, Tensor)
            assert (returned.shape, returned.dtype, returned.device) == ((), torch.float32, device())
            assert all(torch.equal(each, returned) for each in of_all_ranks(returned))
            torch.testing.assert_close(returned.cpu(), norm)
            factor = min(1.0, max_norm / float(norm))
            clipped = {name: factor * gradient for name, gradient in expected.items()}
            torch.testing.assert_close(whole(model, group=group)[1], clipped, rtol=1e-5, atol=1e-6)


@pytest.mark.spec("CLIP-02")
@ranks(4)
def test_padding_does_not_count() -> None:
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False).to(device()))
    model(torch.full((1, 1), 3.0, device=device())).sum().backward()
    for norm_type in NORM_TYPES:
        assert model.clip_grad_norm_(100.0, norm_type) == 3.0, "three of the four ranks store only padding"


@pytest.mark.spec("CLIP-02")
@ranks(4)
def test_in_a_sub_group_the_norm_is_that_of_the_sub_group() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    model = wrapped(process_group=pairs[pair])
    iterate(model)
    of_ranks = [local_gradients(seeded(), [0], rank) for rank in (2 * pair, 2 * pair + 1)]
    expected = {name: (of_ranks[0][name] + of_ranks[1][name]) / 2 for name in of_ranks[0]}
    torch.testing.assert_close(model.clip_grad_norm_(1.0).cpu(), norm_of(expected))


# --- the gradients ---


@pytest.mark.spec("CLIP-03")
@either
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_gradients_are_scaled_in_place(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [None if gradient is None else gradient.clone() for gradient in gradients]
    norm = float(model.clip_grad_norm_(1e6))
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients, before, strict=True)), "unchanged below the limit"
    model.clip_grad_norm_(0.5 * norm)
    for parameter, gradient, earlier in zip(model.parameters(), gradients, before, strict=True):
        assert parameter.grad is gradient
        if gradient is not None:
            torch.testing.assert_close(gradient, 0.5 * earlier, rtol=1e-5, atol=0.0)


# --- participating ranks ---


@pytest.mark.spec("CLIP-04")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, *HYBRID_STRATEGIES])
@ranks(4)
def test_every_rank_issues_the_reduction_of_the_norm(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    iterate(model)
    with Wire() as wire:
        model.clip_grad_norm_(1.0)
    sent: list[Any] = [None] * 4
    dist.all_gather_object(sent, wire.sent)
    assert sent == [[("AR", 1)]] * 4, "one number, once for all units"


@pytest.mark.spec("CLIP-05")
@either
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@ranks(2)
def test_clipping_without_sharding_equals_the_function_of_torch(norm_type: float | str, use_orig_params: bool) -> None:
    ours, other = (wrapped(sharding_strategy=NO_SHARD, use_orig_params=use_orig_params) for _ in range(2))
    for model in (ours, other):
        iterate(model)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.2, float(norm_type))
    torch.testing.assert_close(ours.clip_grad_norm_(0.2, norm_type), expected, rtol=1e-6, atol=0.0)
    for mine, theirs in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.spec("CLIP-06")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_norm_function_of_torch_uses_only_local_shards(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    iterate(model)
    seen = torch.stack(of_all_ranks(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    right = model.clip_grad_norm_(1e6)
    assert seen[0] != seen[1]
    assert (seen < 0.99 * right).all(), "the norm is also unchanged"
    torch.testing.assert_close(seen.norm(), right, rtol=1e-6, atol=0.0)


# --- dtypes ---


def two_blocks(dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> FullyShardedDataParallel:
    """Two units. Each keeps its gradients in its compute dtype."""

    def unit(module: nn.Module, dtype: torch.dtype) -> FullyShardedDataParallel:
        precision = MixedPrecision(param_dtype=dtype, keep_low_precision_grads=True, cast_forward_inputs=True)
        return FullyShardedDataParallel(module, mixed_precision=precision, **options)

    blocks = seeded(pair_of_blocks)
    return FullyShardedDataParallel(nn.Sequential(*map(unit, blocks, dtypes)), **options)


def pair_of_blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


@pytest.mark.spec("CLIP-02", "CLIP-07")
@either
@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float64, torch.float64), torch.float64),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.float16, torch.bfloat16), torch.float32),
    ],
)
@ranks(2)
def test_the_dtype_of_the_norm_is_the_promotion_of_all_gradients(
    dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype, use_orig_params: bool
) -> None:
    model = two_blocks(dtypes, use_orig_params=use_orig_params)
    model(batch()).float().square().mean().backward()
    found = [p.grad.dtype for p in model.parameters() if p.grad is not None]
    assert set(found) == set(dtypes)
    gradients = whole(model, pair_of_blocks)[1]
    norm = model.clip_grad_norm_(0.5)
    assert norm.dtype is expected
    assert all(torch.equal(each, norm) for each in of_all_ranks(norm))
    # 84 squares are added in float32, and the result is rounded once.
    rtol = tolerance(torch.float32, 84) + tolerance(expected)
    torch.testing.assert_close(norm.cpu(), norm_of(gradients).to(expected), rtol=rtol, atol=0.0)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == found, "gradients keep their dtype"


# --- elements that the norm includes ---


def parts() -> nn.Module:
    """A model with a part that is sharded, a part that is replicated, and a part that is ignored."""
    return nn.Sequential(OrderedDict(shards=Block(), copies=Block(), own=Block(), leave=nn.Linear(6, 2)))


def mixed(strategy: ShardingStrategy, **options: Any) -> FullyShardedDataParallel:
    model = seeded(parts)
    model.shards = FullyShardedDataParallel(model.shards, sharding_strategy=strategy, **options)
    model.copies = FullyShardedDataParallel(model.copies, sharding_strategy=NO_SHARD, **options)
    return FullyShardedDataParallel(model, sharding_strategy=strategy, ignored_modules=[model.own], **options)


@pytest.mark.spec("CLIP-08")
@either
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(4)
def test_norm_counts_each_element_once(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    # All ranks use the same batch, so that the ignored part has the same gradient on all four ranks.
    plain = seeded(parts)
    loss_of(plain(batch(0, 0))).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for norm_type in NORM_TYPES:
        model = mixed(strategy, use_orig_params=use_orig_params)
        loss_of(model(batch(0, 0))).backward()
        norm = norm_of(expected, norm_type)
        returned = model.clip_grad_norm_(0.5 * float(norm), norm_type)
        torch.testing.assert_close(returned.cpu(), norm)
        own = {name: p.grad for name, p in by_name(model).items() if name.startswith("own.")}
        assert len(own) == 2
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, 0.5 * expected[name], rtol=1e-5, atol=1e-7)
        copies = torch.cat([p.grad.reshape(-1) for name, p in by_name(model).items() if name.startswith("copies")])
        assert copies.numel() == 42
        torch.testing.assert_close(
            copies, 0.5 * torch.cat([expected[f"copies.linear.{n}"].reshape(-1) for n in ("weight", "bias")])
        )


@pytest.mark.spec("CLIP-08")
@either
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_a_shared_parameter_counts_once(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(seeded(Tied), sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    norm = norm_of(mean_gradients(seeded(Tied)))
    torch.testing.assert_close(model.clip_grad_norm_(1.0).cpu(), norm)


@pytest.mark.spec("CLIP-08")
@ranks(2)
def test_frozen_units_do_not_count_for_the_norm() -> None:
    plain = seeded()
    plain.blocks[1].requires_grad_(False)
    model = wrapped(seeded(lambda: plain))
    iterate(model)
    expected = {n: g for n, g in mean_gradients(seeded()).items() if not n.startswith("blocks.1")}
    torch.testing.assert_close(model.clip_grad_norm_(1.0).cpu(), norm_of(expected))


# --- errors ---


@pytest.mark.spec("CLIP-09")
@ranks(2)
def test_only_the_root_clips_gradients() -> None:
    model = wrapped()
    for _ in range(2):
        # The first call comes before the first forward, when the nesting is known only from the constructor.
        for index in range(4):
            with Wire() as wire, pytest.raises(RuntimeError, match=r"rank \d.*clip_grad_norm_.*root"):
                model.module.blocks[index].clip_grad_norm_(1.0)
            assert wire.sent == []
        iterate(model)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="root"):
        model.module.blocks[0].clip_grad_norm_(1e-3)
    assert_same({name: p.grad for name, p in model.named_parameters()}, before, bitwise=True)


@pytest.mark.spec("CLIP-10")
@either
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_clipping_without_gradients_returns_zero_and_warns(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = wrapped(seeded().to(dtype), sharding_strategy=strategy, use_orig_params=use_orig_params)
        with pytest.warns(UserWarning, match=rf"rank {dist.get_rank()}.*no gradients") as caught:
            norm = model.clip_grad_norm_(1.0)
        assert [warning.filename for warning in caught] == [__file__]
        assert norm == 0.0
        assert norm.dtype is torch.float32
        assert norm.shape == ()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.spec("CLIP-02", "CLIP-04", "CLIP-10")
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:.*no gradients:UserWarning")
@ranks(2)
def test_a_rank_without_a_gradient_sends_a_number_of_the_dtype_that_the_others_send(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    # The model has only one element, which rank 0 stores. Rank 1 has no gradient.
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False, device=device()), use_orig_params=True)
    model(torch.full((1, 1), 3.0, device=device())).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [dist.get_rank() == 1]
    with Wire() as wire:
        assert float(model.clip_grad_norm_(1.0)) == 3.0
    assert wire.sent == [("AR", 1)]
