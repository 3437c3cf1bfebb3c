"""The first value that is not finite is reported on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minifsdp
from spec_tests.debugging.faults import on_rank, spoil
from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, Api, all_apis, both_apis
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP
from spec_tests.models.values import assert_same, full_values

NAN, INF = float("nan"), float("inf")


def places(phase: str, action: Callable[[], Any]) -> list[str]:
    """Runs an action whose forward or backward fails on this rank. Returns the places that the message names."""
    with pytest.raises(RuntimeError, match="values that are not finite") as caught:
        action()
    text = str(caught.value)
    assert text.startswith(f"rank {dist.get_rank()}: ")
    assert f"appear in this {phase}, so all ranks stop" in text
    return re.findall(r"^rank \d+: (?!values that).*$", text, re.MULTILINE)


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_non_finite_gradient_is_reported_on_every_rank_before_the_reduction(api: Api) -> None:
    plain = seeded()
    spoil(plain.blocks[1].linear, 1, NAN, in_backward=True)
    model = api.shard(plain)
    with minifsdp.debug("values"):
        loss = loss_of(model(batch()))
        found = places("backward", loss.backward)
    # One value of the 3 x 6 output gradient affects one row of the weight's gradient.
    place = "gradient of 'blocks.1.linear.weight' before it was reduced: 6 nan and 0 inf among 36 values"
    assert found == [f"rank 1: {place}"]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_each_rank_reports_its_own_first_non_finite_activation(api: Api) -> None:
    plain = seeded()
    spoil(plain.blocks[3].linear, 0, NAN)
    spoil(plain.blocks[1].linear, 1, NAN)
    model = api.shard(plain)
    with minifsdp.debug("values"):
        found = places("forward", lambda: model(batch()))
    assert found == [
        "rank 0: activation that unit 'blocks.3' returned: 1 nan and 0 inf among 18 values",
        "rank 1: activation that unit 'blocks.1' returned: 1 nan and 0 inf among 18 values",
    ]


@pytest.mark.spec("DEBUG-05")
@all_apis
@pytest.mark.parametrize(("strategy", "num_nan"), [(FULL_SHARD, 1), (FULL_SHARD, 0), (SHARD_GRAD_OP, 1)])
@ranks(2)
def test_every_unsharding_rank_names_bad_parameter(api: Api, strategy: Any, num_nan: int) -> None:
    model = api.shard(strategy=strategy)
    iterate(model)
    parameter = next(parameter for name, parameter in model.named_parameters() if "blocks.3" in name)
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    bad = torch.tensor([INF, NAN][: 1 + num_nan])
    on_rank(1, lambda: shard.view(-1)[: len(bad)].copy_(bad))
    with minifsdp.debug("values"), torch.no_grad():
        found = places("forward", lambda: model(batch(1)))
    place = f"parameter 'blocks.3.linear.weight' after its all-gather: {num_nan} nan and 1 inf among 36 values"
    assert found == [f"rank {rank}: {place}" for rank in (0, 1)]


@pytest.mark.spec("DEBUG-05")
@both_apis
@pytest.mark.parametrize("rank", [0, 3])
@ranks(4)
def test_all_ranks_of_a_hybrid_mesh_raise(api: Api, rank: int) -> None:
    plain = seeded()
    spoil(plain.blocks[0].linear, rank, INF, in_backward=True)
    model = api.shard(plain, strategy=HYBRID_SHARD)
    with minifsdp.debug("values"):
        loss = loss_of(model(batch()))
        found = places("backward", loss.backward)
    assert [line.startswith(f"rank {rank}: gradient of 'blocks.0.linear.weight'") for line in found] == [True]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_accumulation_raises_in_the_micro_batch_with_a_non_finite_gradient(api: Api) -> None:
    plain = seeded()
    layer = plain.blocks[2].linear
    model = api.shard(plain)
    with minifsdp.debug("values"), api.no_sync(model):
        iterate(model)
        spoil(layer, 1, NAN, in_backward=True)
        found = places("backward", lambda: iterate(model))
    assert "rank 1: gradient of 'blocks.2.linear.weight'" in found[0]


@pytest.mark.spec("DEBUG-05")
@both_apis
@ranks(2)
def test_evaluation_without_communication_works_on_one_rank(api: Api) -> None:
    model = api.shard(strategy=NO_SHARD)
    with minifsdp.debug("values"):
        iterate(model)
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(1))
        iterate(model)


@pytest.mark.spec("DEBUG-05")
@both_apis
@ranks(2)
def test_overflowing_sum_of_finite_values_is_not_reported(api: Api) -> None:
    plain = seeded()
    with torch.no_grad():
        plain.enter.weight.fill_(3e38)
        plain.enter.weight[3:].neg_()
    model = api.shard(plain)
    with minifsdp.debug("values"), torch.no_grad():
        model(torch.zeros(3, 6, device=device()))


@pytest.mark.spec("DEBUG-06")
@all_apis
@pytest.mark.parametrize("in_backward", [False, True])
@ranks(2)
def test_training_continues_after_fault(api: Api, in_backward: bool) -> None:
    plain, untouched = seeded(), api.shard()
    fault = spoil(plain.blocks[1].linear, 1, NAN, in_backward=in_backward)
    model = api.shard(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, untouched)]
    with minifsdp.debug("values"):
        places("backward" if in_backward else "forward", lambda: iterate(model))
        fault.remove()
        optimizers[0].zero_grad()
        for step in (1, 2):
            assert iterate(model, step, optimizers[0]) == iterate(untouched, step, optimizers[1])
    assert_same(full_values(model), full_values(untouched), bitwise=True)


@pytest.mark.spec("DEBUG-06")
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@ranks(2)
def test_interrupted_forward_leaves_no_report_for_later(api: Api) -> None:
    plain = seeded()
    fault = spoil(plain.blocks[0].linear, 0, NAN)
    broken = plain.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    model = api.shard(plain)
    with minifsdp.debug("values"):
        with pytest.raises(ZeroDivisionError):
            model(batch())
        broken.remove()
        fault.remove()
        iterate(model)


# --- complex numbers, integers and 8-bit floats ---


class Filter(nn.Module):
    """A unit with complex weights. Its input is real and its output complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 + 2j, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Picker(nn.Linear):
    """A unit that also returns integers and booleans."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output, output.argmax(-1), output.isnan()


class Quantizer(nn.Linear):
    """A unit that returns 8-bit floats."""

    dtype = torch.float8_e4m3fn

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.dtype)


def shard(api: Api, layer: nn.Module) -> Any:
    """A model with this layer as its only unit."""
    return api.shard(nn.Sequential(layer).to(device()), unit_classes=(type(layer),))


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("in_backward", [False, True])
@all_apis
@ranks(2)
def test_a_complex_value_that_is_not_finite_is_named(api: Api, in_backward: bool, dtype: torch.dtype) -> None:
    layer = Filter(dtype)
    spoil(layer, 1, complex("nan"), in_backward=in_backward)
    model = shard(api, layer)
    place = "activation that unit '0' returned: 1 nan and 0"
    if in_backward:
        place = r"rank 1: gradient of '0\.weight' before it was reduced: 1 nan and 0"
    with minifsdp.debug("values"), pytest.raises(RuntimeError, match=place):
        model(batch()).abs().sum().backward()


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("value", [complex(1, INF), complex("nan")])
@all_apis
@ranks(2)
def test_a_complex_parameter_that_is_not_finite_is_named_on_every_rank(api: Api, value: complex) -> None:
    layer = Filter(torch.complex64)
    with torch.no_grad():
        layer.weight[0] = value
    model = shard(api, layer)
    with minifsdp.debug("values"):
        found = places("forward", lambda: model(batch()))
    assert [line.startswith(f"rank {rank}: parameter '0.weight'") for rank, line in enumerate(found)] == [True, True]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_integer_and_boolean_outputs_are_no_error_and_hide_none(api: Api) -> None:
    model = shard(api, Picker(WIDTH, WIDTH))
    with minifsdp.debug("values"):
        model(batch())[0].sum().backward()
        with pytest.raises(RuntimeError, match=r"tensor 1 of 3, that unit '0' returned: 18 nan"):
            model(torch.full((3, WIDTH), NAN, device=device()))


@pytest.mark.spec("DEBUG-05")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@all_apis
@ranks(2)
def test_an_activation_of_8_bit_floats_is_named_only_if_it_is_not_finite(api: Api, dtype: torch.dtype) -> None:
    layer = Quantizer(WIDTH, WIDTH)
    layer.dtype = dtype
    model, x = shard(api, layer), batch()
    with minifsdp.debug("values"), torch.no_grad():
        assert model(x).dtype is dtype
        x[0] = NAN
        with pytest.raises(RuntimeError, match=f"activation that unit '0' returned: {WIDTH} nan and 0"):
            model(x)
