"""``clip_grad_norm_``: clips by the norm of all gradients.

The expected norm is that of the unwrapped model's gradients, averaged over the ranks' batches and concatenated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models import apis, modules, running, values
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
NORM_TYPES = (1, 2.0, 3, "inf")


def norm_of(gradients: dict[str, Tensor], norm_type: float | str = 2.0) -> Tensor:
    """The p-norm of all gradients as one vector, computed in float64."""
    row = torch.cat([gradient.reshape(-1).double() for gradient in gradients.values()])
    return torch.linalg.vector_norm(row, float(norm_type)).float()


def of_all_ranks(mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


# --- arguments ---


@pytest.mark.spec("CLIP-01")
@ranks(2)
def test_max_norm_accepts_int_and_norm_type_accepts_string() -> None:
    model = apis.WRAPPED.shard()
    running.iterate(model)
    default = model.clip_grad_norm_(1000.0)
    for norm_type in (2, 2.0, "2", "2.0"):
        assert model.clip_grad_norm_(1000, norm_type) == default
        assert model.clip_grad_norm_(max_norm=1000.0, norm_type=norm_type) == default
    assert model.clip_grad_norm_(1000, "inf") == model.clip_grad_norm_(1000.0, math.inf)


# --- the norm and the gradients ---


@pytest.mark.spec("CLIP-02", "CLIP-03", "CLIP-05")
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2])
@apis.wrapper_apis
@ranks(4)
def test_norm_and_clipped_gradients_are_those_of_one_process(
    api: Any, strategy: ShardingStrategy, norm_type: float | str
) -> None:
    model, expected = api.shard(strategy=strategy), values.mean_gradients(modules.seeded())
    running.iterate(model)
    norm = norm_of(expected, norm_type)
    for factor in (2.0, 0.25):
        returned = model.clip_grad_norm_(factor * float(norm), norm_type)
        assert (returned.shape, returned.dtype, returned.device) == ((), torch.float32, device())
        assert all(torch.equal(each, returned) for each in of_all_ranks(returned))
        torch.testing.assert_close(returned, norm)
        clipped = {name: min(1.0, factor) * gradient for name, gradient in expected.items()}
        torch.testing.assert_close(api.gradients(model), clipped, rtol=1e-5, atol=1e-6)


@pytest.mark.spec("CLIP-02")
@ranks(4)
def test_padding_does_not_count() -> None:
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False).to(device()))
    model(torch.full((1, 1), 3.0, device=device())).sum().backward()
    for norm_type in NORM_TYPES:
        assert model.clip_grad_norm_(100.0, norm_type) == 3.0, "three of the four ranks store only padding"


@pytest.mark.spec("CLIP-03")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@apis.wrapper_apis
@ranks(2)
def test_gradients_are_scaled_in_place(api: Any, strategy: ShardingStrategy) -> None:
    model = api.shard(strategy=strategy)
    running.iterate(model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    before = [gradient.clone() for gradient in gradients]
    norm = float(model.clip_grad_norm_(1e6))
    assert all(map(torch.equal, gradients, before)), "unchanged below the limit"
    model.clip_grad_norm_(0.5 * norm)
    kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient is other for gradient, other in zip(gradients, kept, strict=True))
    torch.testing.assert_close(gradients, [0.5 * gradient for gradient in before], rtol=1e-5, atol=0.0)


# --- participating ranks ---


@pytest.mark.spec("CLIP-04")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2])
@ranks(4)
def test_every_rank_reduces_one_number_for_all_units(strategy: ShardingStrategy) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    running.iterate(model)
    with running.Wire() as wire:
        model.clip_grad_norm_(1.0)
    sent: list[Any] = [None] * 4
    dist.all_gather_object(sent, wire.sent)
    assert sent == [[("AR", 1)]] * 4


# --- dtypes ---


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.spec("CLIP-02", "CLIP-07")
@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [((BF16, BF16), BF16), ((FP32, FP64), FP64), ((FP16, BF16), FP32)],
)
@apis.wrapper_apis
@ranks(2)
def test_the_dtype_of_the_norm_is_the_promotion_of_all_gradients(
    api: Any, dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype
) -> None:
    def unit(dtype: torch.dtype) -> Any:
        precision = {"param_dtype": dtype, "keep_low_precision_grads": True, "cast_forward_inputs": True}
        return api.unit(modules.seeded(modules.Block), precision=precision)

    model = api.unit(nn.Sequential(*map(unit, dtypes)))
    model(running.batch()).float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = [gradient.dtype for gradient in gradients]
    assert set(found) == set(dtypes)
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    norm = model.clip_grad_norm_(0.5)
    assert norm.dtype is expected
    assert all(torch.equal(each, norm) for each in of_all_ranks(norm))
    # 84 squares are added in float32, and the result is rounded once.
    rtol = 84 * torch.finfo(FP32).eps + torch.finfo(expected).eps
    total = sum(of_all_ranks(squares)).sqrt()
    torch.testing.assert_close(norm, total.to(expected), rtol=rtol, atol=0.0)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == found, "gradients keep their dtype"


# --- elements that the norm includes ---


def parts() -> nn.Module:
    """A model with a part that is sharded, a part that is replicated, and a part that is ignored."""
    return nn.Sequential(
        OrderedDict(shards=modules.Block(), copies=modules.Block(), own=modules.Block(), leave=nn.Linear(6, 2))
    )


@pytest.mark.spec("CLIP-08")
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@apis.wrapper_apis
@ranks(4)
def test_norm_counts_each_element_once(api: Any, strategy: ShardingStrategy, norm_type: float | str) -> None:
    plain, model = modules.seeded(parts), modules.seeded(parts)
    copies, own = model.copies.linear, model.own.linear
    model.shards = api.unit(model.shards, strategy=strategy)
    model.copies = api.unit(model.copies, strategy=NO_SHARD)
    model = api.unit(model, strategy=strategy, ignored_modules=[model.own])
    # All ranks use the same batch, so that the ignored part has the same gradient on all four ranks.
    for each in (plain, model):
        each(running.batch(0, 0)).square().mean().backward()
    norm = norm_of({name: parameter.grad for name, parameter in plain.named_parameters()}, norm_type)
    returned = model.clip_grad_norm_(0.5 * float(norm), norm_type)
    torch.testing.assert_close(returned, norm)
    torch.testing.assert_close(own.weight.grad, 0.5 * plain.own.linear.weight.grad, rtol=1e-5, atol=1e-7)
    if api == apis.ORIGINALS:
        found = copies.weight.grad.view(6, 6)
        torch.testing.assert_close(found, 0.5 * plain.copies.linear.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.spec("CLIP-08")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@apis.wrapper_apis
@ranks(2)
def test_a_shared_parameter_counts_once(api: Any, strategy: ShardingStrategy) -> None:
    model = api.unit(modules.seeded(modules.Tied), strategy=strategy)
    running.iterate(model)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm_of(values.mean_gradients(modules.seeded(modules.Tied))))


@pytest.mark.spec("CLIP-08")
@ranks(2)
def test_frozen_units_do_not_count_for_the_norm() -> None:
    plain = modules.seeded()
    plain.blocks[1].requires_grad_(False)
    expected = values.mean_gradients(plain)
    model = apis.WRAPPED.shard(plain)
    running.iterate(model)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm_of(expected))


# --- errors ---


@pytest.mark.spec("CLIP-01", "FUZZ-02")
@pytest.mark.parametrize("given", [{"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": math.nan}], ids=str)
@ranks(2)
def test_clipping_to_nan_is_refused_and_changes_no_gradient(given: dict[str, float]) -> None:
    model = apis.WRAPPED.shard()
    running.iterate(model)
    before = apis.WRAPPED.gradients(model)
    with pytest.raises(TypeError, match=r"rank \d: .*norm.*number"):
        model.clip_grad_norm_(**given)
    values.assert_same(apis.WRAPPED.gradients(model), before, bitwise=True)


@pytest.mark.spec("CLIP-09")
@ranks(2)
def test_only_the_root_clips_gradients() -> None:
    model = apis.WRAPPED.shard()
    for _ in range(2):
        # The first call comes before the first forward, when the nesting is known only from the constructor.
        with running.Wire() as wire, pytest.raises(RuntimeError, match=r"rank \d.*clip_grad_norm_.*root"):
            model.blocks[2].clip_grad_norm_(1e-3)
        assert wire.sent == []
        running.iterate(model)
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(modules.seeded(), (0, 0)), bitwise=False)


@pytest.mark.spec("CLIP-10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@apis.wrapper_apis
@ranks(2)
def test_clipping_without_gradients_returns_zero_and_warns(
    api: Any, strategy: ShardingStrategy, dtype: torch.dtype
) -> None:
    model = api.shard(modules.seeded().to(dtype), strategy=strategy)
    with pytest.warns(UserWarning, match=rf"rank {dist.get_rank()}.*no gradients") as caught:
        norm = model.clip_grad_norm_(1.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())
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
    with running.Wire() as wire:
        assert float(model.clip_grad_norm_(1.0)) == 3.0
    assert wire.sent == [("AR", 1)]
