"""Parameters of tensor classes that define their own all-gather and few operators, as the classes of torchao do.

Each class computes twice what a plain tensor would compute, so a parameter that has lost its class is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.subject import MixedPrecisionPolicy, fully_shard

VIEWS = ("detach", "as_strided", "view", "slice")
COPIES = ("new_zeros", "clone", "_to_copy", "copy_", "split")


class Twice(torch.autograd.Function):
    """A linear layer with twice the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        values = weight.values()
        ctx.save_for_backward(x, values)
        return x @ values.t() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, values = ctx.saved_tensors
        return gradient @ values * 2, gradient.t() @ x * 2


class Small(Tensor):
    """Values of any class: a tensor, and a scale for each row. Operators that are not listed give plain tensors."""

    views: tuple[str, ...] = VIEWS
    copies: tuple[str, ...] = COPIES

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_, self.scale = data, scale

    def values(self) -> Tensor:
        return self.data_ * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Twice.apply(args[0], args[1]) + (args[2] if len(args) > 2 else 0)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, me = func._schema.name.removeprefix("aten::"), args[0]
        if name in cls.views or name in cls.copies:
            return getattr(cls, f"_{name.strip('_')}")(*args)
        return cls._other(func, args, kwargs or {}, me)

    @classmethod
    def _other(cls, func: Any, args: Any, kwargs: Any, me: Any) -> Any:
        result = func(*(arg.values() if isinstance(arg, Small) else arg for arg in args), **kwargs)
        return me._copy(result) if func._schema.name.endswith("_") else result

    def each(self, change: Callable[[Tensor], Tensor]) -> Any:
        return type(self)(change(self.data_), change(self.scale))

    def _detach(self) -> Any:
        return self.each(lambda tensor: tensor)

    def _as_strided(self, shape: Any, *_: Any) -> Any:
        if tuple(shape) != tuple(self.shape):
            raise NotImplementedError(f"as_strided {shape}")
        return self._detach()

    def _view(self, shape: Any) -> Any:
        return self._detach()

    def _slice(self, dim: int = 0, start: int = 0, end: int = 0) -> Any:
        return self.each(lambda tensor: tensor[start:end])

    def _split(self, size: int, dim: int = 0) -> Any:
        return [type(self)(*both) for both in zip(self.data_.split(size), self.scale.split(size), strict=True)]

    def _new_zeros(self, shape: Any) -> Any:
        return self.each(lambda tensor: tensor.new_zeros(shape[0], tensor.shape[1]))

    def _clone(self) -> Any:
        return self.each(torch.clone)

    def _to_copy(self, *_: Any) -> Any:
        return self._clone()

    def _copy(self, other: Tensor) -> Any:
        if not isinstance(other, Small):
            scale = other.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
            other = type(self)((other / scale).round().to(self.data_.dtype), scale)
        self.data_.copy_(other.data_)
        self.scale.copy_(other.scale)
        return self

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (self.data_, self.scale), None

    def fsdp_post_all_gather(self, got: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return type(self)(*got), got
        assert type(out) is type(self)
        out.data_, out.scale = (tensor[: len(out)] for tensor in got)
        return None


class SplitOnly(Small):
    """Can be split but not sliced, and raises for unknown operators, as NF4Tensor does."""

    @classmethod
    def _other(cls, func: Any, args: Any, kwargs: Any, me: Any) -> Any:
        raise NotImplementedError(func._schema.name)

    def _slice(self, dim: int = 0, start: int = 0, end: int = 0) -> Any:
        if start or end < self.shape[dim]:
            raise NotImplementedError(f"slice {start} {end}")
        return self._detach()


class NoSlices(SplitOnly):
    """Has neither slices nor strides."""

    views = ("detach", "view")


class CopiesSlices(Small):
    """A slice has its own memory, as in a class that packs several values into one byte."""

    def _slice(self, dim: int = 0, start: int = 0, end: int = 0) -> Any:
        return self.each(lambda tensor: tensor[start:end].clone())


class OneArgument(Small):
    """Has the older form of the first method."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        assert mesh.size() == dist.get_world_size()
        return (self.data_, self.scale), "metadata"

    def fsdp_post_all_gather(self, got: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        assert metadata == "metadata"
        return super().fsdp_post_all_gather(got, metadata, dtype, out=out)


class Signs(Small):
    """The unsharded parameter of `SendsSigns`: signs, and one scale."""


class SendsSigns(Small):
    """The unsharded parameter has another class than the shard, as in BitNet."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        values = self.values()
        return (values.sign().to(torch.int8), values.abs().mean(1, keepdim=True)), None

    def fsdp_post_all_gather(self, got: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return Signs(got[0], got[1]), got
        assert type(out) is Signs
        out.data_, out.scale = (tensor[: len(out)] for tensor in got)
        return None


KINDS: list[type[Small]] = [Small, SplitOnly, NoSlices, CopiesSlices, OneArgument, SendsSigns]


def rows_of(kind: type[Small], rows: int) -> Small:
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(-100, 100, (rows, 8), generator=generator, dtype=torch.int8)
    return kind(data.to(device()), (torch.rand(rows, 1, generator=generator) / 100).to(device()))


def layer_of(kind: type[Small], rows: int, *, is_trained: bool) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(8, rows).to(device())
    layer.weight = nn.Parameter(rows_of(kind, rows), requires_grad=is_trained)
    return layer


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device())


def expected_weight(kind: type[Small], rows: int) -> Tensor:
    values = rows_of(kind, rows).values()
    return values.sign() * values.abs().mean(1, keepdim=True) if kind is SendsSigns else values


@pytest.mark.spec("PROG-83", "FS2-EXT-02")
@pytest.mark.parametrize(
    ("kind", "rows"), [*((kind, 4) for kind in KINDS), *((kind, 3) for kind in (Small, OneArgument, SendsSigns))]
)
@ranks(2)
def test_a_module_computes_with_the_tensor_that_was_returned(kind: type[Small], rows: int) -> None:
    layer = layer_of(kind, rows, is_trained=False)
    expected = F.linear(batch(), expected_weight(kind, rows) * 2, layer.bias)
    model = fully_shard(nn.Sequential(layer))
    assert type(layer.weight.to_local()) is kind
    for _ in range(3):
        found = model(batch())
        torch.testing.assert_close(found, expected)
        found.sum().backward()
    model.unshard()
    assert type(layer.weight) is (Signs if kind is SendsSigns else kind)
    model.reshard()
    torch.testing.assert_close(model(batch()), expected)


@pytest.mark.spec("PROG-83")
@pytest.mark.parametrize("kind", [Small, CopiesSlices, OneArgument, SendsSigns])
@pytest.mark.not_simulated("its tensors cannot become tensors of another class")
@ranks(2)
def test_such_parameters_are_trained(kind: type[Small]) -> None:
    layer = layer_of(kind, 4, is_trained=True)
    weight = expected_weight(kind, 4).requires_grad_()
    model = fully_shard(nn.Sequential(layer), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model(batch()).square().mean().backward()
    F.linear(batch(), weight * 2, layer.bias.full_tensor().detach()).square().mean().backward()
    assert isinstance(layer.weight.grad, DTensor)
    assert weight.grad is not None
    mine = weight.grad.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(layer.weight.grad.to_local(), mine)
    before = layer.weight.to_local().values().clone()
    with torch.no_grad():
        layer.weight.to_local().copy_(before - mine)
    second = model(batch())
    model.reshard()
    after = layer.weight.to_local().values()
    torch.testing.assert_close(after, before - mine, atol=0.02, rtol=0)
    if kind is not SendsSigns:
        parts = [torch.empty_like(after) for _ in range(2)]
        dist.all_gather(parts, after.contiguous())
        torch.testing.assert_close(second, F.linear(batch(), torch.cat(parts) * 2, layer.bias.full_tensor()))
