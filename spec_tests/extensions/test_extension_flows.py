"""Tensors with their own all-gather in complete programs: built on meta, and with patched methods."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from minifsdp.cases.tensor_extensions import ExtendedBucket
from minifsdp.engine.sharded_param import Options
from spec_tests import subject
from spec_tests.extensions import int8_shards
from spec_tests.harness import device, ranks
from spec_tests.models import buckets, modules, running
from spec_tests.models.stand_in import machine
from spec_tests.oracles import count_collectives
from spec_tests.subject import CPUOffloadPolicy, fully_shard

__all__ = ["machine"]

NARROW = torch.bfloat16
WIDTH, batch = modules.WIDTH, running.batch
Plain, extended, local = int8_shards.Plain, int8_shards.extended, int8_shards.local


def plain_layer(rows: int = 4, bias: bool = True) -> Any:
    return modules.seeded(lambda: nn.Linear(WIDTH, rows, bias))


# --- values that change inside the tensor ---


@pytest.mark.spec("FS2-EXT-01", "FS2-19")
@ranks(2)
def test_unit_that_stays_unsharded_computes_with_changed_inner_tensor() -> None:
    """Defect: PyTorch's version counters do not change, so the unit uses the values all-gathered before."""
    plain = plain_layer(bias=False)
    layer = fully_shard(extended(plain_layer(bias=False), Plain), reshard_after_forward=False)
    shard = layer.weight._local_tensor
    layer(batch())
    with torch.no_grad():
        shard.inner.mul_(2)
        plain.weight.mul_(2)
        assert torch.equal(layer(batch()), plain(batch()))


@pytest.mark.spec("FS2-EXT-01", "FS2-06")
@ranks(2)
def test_inner_tensor_of_extended_param_is_freed() -> None:
    """Defect: the DTensor keeps the parameter's attributes, and one of them is the unsharded value."""
    layer = extended(plain_layer(bias=False), Plain)
    whole = weakref.ref(layer.weight.inner)
    layer.weight.note = "a user's"
    fully_shard(layer)
    gc.collect()
    assert whole() is None
    assert layer.weight.note == "a user's"


# --- tensors with any strides ---


class Striding(Plain):
    """Sends the tensor in column-major order, and computes with a tensor in that order."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (self.inner.t().contiguous().t(),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (whole,) = gathered
        if out is None:
            columns = whole.t().contiguous()
            return columns.t(), (columns,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            # The received data ends with the padding.
            out.copy_(whole[: len(out)])
        return None


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.spec("FS2-EXT-02")
@ranks(2)
def test_tensors_with_any_strides_are_sent_and_used_in_forward(rows: int) -> None:
    usual = fully_shard(plain_layer(rows, bias=False))
    layer = fully_shard(extended(plain_layer(rows, bias=False), Striding))
    for step in range(2):
        torch.testing.assert_close(layer(batch(step)), usual(batch(step)))
        for either in (layer, usual):
            either(batch(step)).square().sum().backward()
        torch.testing.assert_close(local(layer.weight.grad), local(usual.weight.grad))


# --- models built on the meta device ---


def narrowed(mine: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
    """The first method: sends bfloat16."""
    return ((mine.inner if isinstance(mine, Half) else mine).to(NARROW),), None


def widened(gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """The second method: casts to the dtype of the unit."""
    (narrow,) = gathered
    assert narrow.dtype is NARROW
    if out is None:
        whole = narrow.to(dtype)
        return whole, (narrow, whole)
    with torch.no_grad(), _unsafe_preserve_version_counter(out):
        out.copy_(narrow[: len(out)])
    return None


class Half(Plain):
    """Is all-gathered in bfloat16 and cast to the dtype of the unit for compute."""

    fsdp_pre_all_gather = narrowed
    fsdp_post_all_gather = staticmethod(widened)


class CountsAsChange(Half):
    """Fills the unsharded parameter like any other tensor, so PyTorch increases its version."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return widened(gathered, metadata, dtype)
        with torch.no_grad():
            out.copy_(gathered[0])
        return None


@pytest.mark.spec("FS2-EXT-01", "PROG-43")
@ranks(2)
def test_an_all_gather_in_low_precision_does_not_round_the_shard() -> None:
    layer = plain_layer(bias=False)
    expected = layer.weight.detach().chunk(2)[dist.get_rank()].clone()
    assert not torch.equal(expected, expected.to(NARROW).to(expected.dtype))
    fully_shard(extended(layer, CountsAsChange))
    with torch.no_grad():
        for step in range(3):
            layer(batch(step))
    assert torch.equal(local(layer.weight), expected)


def filled(model: nn.Module) -> nn.Module:
    """Allocates a model built on meta and sets values that do not depend on the library that sharded it."""
    model.to_empty(device=device())
    generator = torch.Generator(device()).manual_seed(7 + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            mine = local(parameter)
            mine.copy_(torch.randn(mine.shape, generator=generator, device=device()) / 4)
    return model


def trained(model: nn.Module) -> list[float]:
    losses = []
    for step in range(3):
        losses.append(running.iterate(model, step))
        int8_shards.step_by_hand(model)
    return losses


def patched(model: Any) -> Any:
    """Sets the two methods on the local tensors of all weights, without a class."""
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            mine = parameter._local_tensor
            mine.fsdp_pre_all_gather = functools.partial(narrowed, mine)
            mine.fsdp_post_all_gather = widened
    return model


@pytest.mark.parametrize("policy", [{}, {"param_dtype": NARROW, "reduce_dtype": torch.float32}])
@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.spec("FS2-EXT-05", "FS2-EXT-06")
@ranks(2)
def test_model_from_the_meta_device_trains_like_in_torch(is_patched: bool, policy: dict[str, Any]) -> None:
    """The class of the weights has the two methods, or each local tensor has them."""
    models = []
    for library in (subject, torch_fsdp):
        with torch.device("meta"):
            model = modules.Stack() if is_patched else extended(modules.Stack(), Half)
        for module in (*model.blocks, model):
            library.fully_shard(module, mp_policy=library.MixedPrecisionPolicy(**policy))
        filled(model)
        models.append(patched(model) if is_patched else model)
    ours, theirs = models
    assert trained(ours) == trained(theirs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert type(mine.to_local()) is type(other.to_local())
        assert torch.equal(local(mine), local(other))


# --- methods that are set on a tensor instance ---


@pytest.mark.spec("FS2-EXT-06")
@ranks(2)
def test_patched_uneven_weight_sends_half_the_bytes() -> None:
    layer, usual = patched(fully_shard(plain_layer(3))), fully_shard(plain_layer(3))
    mine = layer.weight._local_tensor
    with count_collectives() as counts:
        output = layer(batch())
    assert counts.num_bytes["all_gather"] == 4 * WIDTH * 2 + 4 * 4, "the bias is not quantized"
    torch.testing.assert_close(output, usual(batch()), rtol=0.02, atol=0.02)
    layer.reshard()
    assert layer.weight._local_tensor is mine


@pytest.mark.spec("FS2-EXT-06")
@ranks(2)
def test_a_patched_weight_on_the_cpu_is_moved_when_it_is_sent() -> None:
    layer = patched(fully_shard(plain_layer(), offload_policy=CPUOffloadPolicy(pin_memory=False)))
    usual = patched(fully_shard(plain_layer()))
    for either in (layer, usual):
        either(batch()).sum().backward()
    assert layer.weight.grad.device.type == layer.weight.device.type == "cpu"
    assert torch.equal(local(layer.weight.grad), local(usual.weight.grad).cpu())


@pytest.mark.spec("FS2-EXT-06")
@ranks(2)
def test_weight_replaced_by_an_ordinary_tensor_is_all_gathered_without_extension() -> None:
    layer = patched(fully_shard(plain_layer()))
    layer(batch())
    layer.load_state_dict({name: value.detach().clone() for name, value in layer.state_dict().items()}, assign=True)
    assert torch.equal(layer(batch()), fully_shard(plain_layer())(batch()))


@pytest.mark.spec("FS2-EXT-03")
@ranks(2)
def test_local_tensor_with_only_one_extension_method_is_refused() -> None:
    layer = fully_shard(plain_layer())
    layer.weight._local_tensor.fsdp_post_all_gather = widened
    with pytest.raises(AssertionError, match="fsdp_pre_all_gather"):
        layer(batch())


# --- streams ---


@pytest.mark.pure
@pytest.mark.cpu
@pytest.mark.spec("STREAM-04", "FS2-EXT-02")
@pytest.mark.proof("order only")
def test_all_gather_of_the_tensors_of_one_rank_is_awaited(machine: Any) -> None:
    one, value = buckets.param(torch.Size([4, 2]), 0, None), torch.ones(4, 2)
    one.mesh, one.use_leaf = SimpleNamespace(ndim=1), lambda leaf, reduce_dtype: None
    bucket: Any = ExtendedBucket(one, int8_shards.Int8Shards(value), Options(torch.device("cpu")))
    layout = buckets.OneBucket(bucket)
    layout.all_gather(machine.comm_streams())
    layout.wait()
    assert machine.log == ["compute waits for gather"] * 2
