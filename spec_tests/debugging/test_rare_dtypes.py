"""The debug checks with complex numbers, integers and 8-bit floats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp
from spec_tests.debugging.faults import Spoiler, said
from spec_tests.harness import device, ranks
from spec_tests.models.apis import ALL_APIS, FULLY_SHARD, Api, all_apis
from spec_tests.models.modules import WIDTH
from spec_tests.models.running import batch

NAN = complex("nan")
COMPLEX = [torch.complex64, torch.complex128]


class Filter(nn.Module):
    """A unit with complex weights. Its input is real and its output complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 + 2j, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Picker(nn.Linear):
    """A unit that also returns the largest element of each sample, and where it is."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output, output.argmax(-1), output.isnan()


def shard(api: Api, layer: nn.Module) -> Any:
    model = nn.Sequential(layer).to(device())
    return api.shard(model, unit_classes=(type(layer),))


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@all_apis
@ranks(2)
def test_a_complex_activation_that_is_not_finite_is_named(api: Api, dtype: torch.dtype) -> None:
    layer = Filter(dtype)
    Spoiler(layer, 1, NAN, in_backward=False)
    model = shard(api, layer)
    with minifsdp.debug("values"), pytest.raises(RuntimeError, match="activation that unit '0' returned: 1 nan and 0"):
        model(batch())


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@all_apis
@ranks(2)
def test_a_complex_gradient_that_is_not_finite_is_named(api: Api, dtype: torch.dtype) -> None:
    layer = Filter(dtype)
    Spoiler(layer, 1, NAN, in_backward=True)
    model = shard(api, layer)
    with minifsdp.debug("values"):
        loss = model(batch()).abs().sum()
        with pytest.raises(RuntimeError, match=r"rank 1: gradient of '0\.weight' before it was reduced: 1 nan and 0"):
            loss.backward()


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("value", [complex(1, float("inf")), NAN])
@all_apis
@ranks(2)
def test_a_complex_parameter_that_is_not_finite_is_named_on_every_rank(api: Api, value: complex) -> None:
    layer = Filter(torch.complex64)
    with torch.no_grad():
        layer.weight[0] = value
    model = shard(api, layer)
    with (
        minifsdp.debug("values"),
        pytest.raises(RuntimeError, match=r"parameter '0\.weight' after its all-gather") as caught,
    ):
        model(batch())
    assert [f"rank {rank}: parameter" in str(caught.value) for rank in range(2)] == [True, True]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_integer_and_boolean_outputs_are_no_error_and_hide_none(api: Api) -> None:
    model = shard(api, Picker(WIDTH, WIDTH))
    with minifsdp.debug("values"):
        model(batch())[0].sum().backward()
        with pytest.raises(RuntimeError, match=r"tensor 1 of 3, that unit '0' returned: 18 nan"):
            model(torch.full((3, WIDTH), float("nan"), device=device()))


@pytest.mark.spec("DEBUG-04")
@pytest.mark.parametrize(
    ("api", "dtype"),
    [
        *((FULLY_SHARD, dtype) for dtype in (torch.bool, torch.int16, torch.int64)),
        *((api, dtype) for api in ALL_APIS for dtype in (torch.float8_e4m3fn, torch.complex64)),
    ],
    ids=str,
)
@ranks(2)
def test_weights_that_differ_between_ranks_are_named_in_any_dtype(api: Api, dtype: torch.dtype) -> None:
    layer = nn.Module()
    values = torch.tensor([0, 1, 0, 1] if dist.get_rank() == 0 else [1, 0, 0, 1], device=device())
    layer.table = nn.Parameter(values.to(dtype), requires_grad=False)
    with minifsdp.debug("weights"), said() as texts:
        api.unit(layer)
    assert ["parameter 'table' on rank(s) 1 differs" in text for text in texts] == [True]


@pytest.mark.spec("DEBUG-08")
@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, *COMPLEX], ids=str)
def test_new_memory_of_any_floating_dtype_has_no_plausible_values(dtype: torch.dtype) -> None:
    layer = nn.Module()
    layer.register_buffer("table", torch.empty(4, dtype=dtype, device="meta"))
    with minifsdp.debug("meta"):
        layer.to_empty(device="cpu")
    assert layer.table.isnan().all()


@pytest.mark.spec("DEBUG-08")
@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16], ids=str)
def test_new_memory_of_any_integer_dtype_has_its_largest_value(dtype: torch.dtype) -> None:
    layer = nn.Module()
    layer.register_buffer("table", torch.empty(4, dtype=dtype, device="meta"))
    with minifsdp.debug("meta"):
        layer.to_empty(device="cpu")
    assert layer.table.tolist() == [torch.iinfo(dtype).max] * 4


class Quantizer(nn.Linear):
    """A unit that returns 8-bit floats."""

    dtype = torch.float8_e4m3fn

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.dtype)


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@all_apis
@ranks(2)
def test_an_activation_of_8_bit_floats_is_named_only_if_it_is_not_finite(api: Api, dtype: torch.dtype) -> None:
    layer = Quantizer(WIDTH, WIDTH)
    layer.dtype = dtype
    model = shard(api, layer)
    x = batch()
    with minifsdp.debug("values"), torch.no_grad():
        assert model(x).dtype is dtype
        x[0] = float("nan")
        with pytest.raises(RuntimeError, match=f"activation that unit '0' returned: {WIDTH} nan and 0"):
            model(x)
