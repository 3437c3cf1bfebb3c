"""Values that are still not initialized after the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp
from spec_tests.debugging.faults import on_rank, said
from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, Api, all_apis, wrapper_apis
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.values import assert_same, full_values

FLOATS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.uint16, torch.int64)


@pytest.mark.spec("DEBUG-08")
@pytest.mark.pure
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_new_memory_contains_no_plausible_values_in_debug_mode(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Module())
    layer[0].register_buffer("table", torch.empty(4, dtype=dtype, device="meta"))
    with minifsdp.debug("meta"):
        layer.to_empty(device="cpu")
    if dtype in FLOATS:
        assert layer[0].table.isnan().all()
    else:
        assert layer[0].table.tolist() == [torch.iinfo(dtype).max] * 4


@pytest.mark.spec("DEBUG-08")
@pytest.mark.pure
def test_new_memory_of_a_module_alone_keeps_the_values_of_inner_modules() -> None:
    outer = nn.Sequential(nn.Linear(1, 1))
    with minifsdp.debug("meta"):
        outer.to_empty(device="cpu", recurse=False)
    assert not outer[0].weight.isnan()


class Rotary(nn.Module):
    """A layer with a table of frequencies, which ``reset_parameters`` may forget, because no checkpoint contains it."""

    forgets = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 6))
        self.register_buffer("inverse", torch.zeros(6), persistent=False)
        # The largest integer is also a value, here for sequences of any length.
        self.register_buffer("bounds", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        # Functions of nn.init might not support shards.
        with torch.no_grad():
            self.weight.fill_(0.5)
            self.bounds.copy_(torch.tensor([0, 512, torch.iinfo(torch.int64).max]))
            if not self.forgets:
                self.inverse.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.inverse


class Model(nn.Module):
    """Two rotary layers in a root that has only a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rotary(), Rotary()])
        self.register_buffer("scale", torch.ones(1))

    def reset_parameters(self) -> None:
        self.scale.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def made(api: Api, *, forgets: bool = False, resets: tuple[type[nn.Module], ...] = (Rotary, Model)) -> Any:
    """Builds the model on the meta device, shards it, and initializes the modules of the classes ``resets``."""
    with torch.device("meta"):
        model = Model()
    model.layers[1].forgets = forgets
    if api != FULLY_SHARD:
        # The wrapper initializes all modules.
        return api.shard(model, unit_classes=(Rotary,), device_id=device())
    api.shard(model, unit_classes=(Rotary,))
    model.to_empty(device=device())
    for module in model.modules():
        if isinstance(module, resets):
            module.reset_parameters()
    return model


def assert_refused(model: Callable[..., Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"rank {dist.get_rank()}: (.|\n)*the model is about to be used") as caught:
        model(batch())
    assert words in str(caught.value)


@pytest.mark.spec("DEBUG-08", "DEBUG-09")
@all_apis
@ranks(2)
def test_model_with_complete_reset_parameters_gives_no_warning(api: Api) -> None:
    with minifsdp.debug("meta"), said() as texts:
        iterate(made(api))
    assert texts == []


@pytest.mark.spec("DEBUG-08")
@wrapper_apis
@ranks(2)
def test_wrapper_lists_tensors_that_reset_parameters_did_not_set(api: Api) -> None:
    with minifsdp.debug("meta"), said() as texts:
        made(api, forgets=True)
    (text,) = texts
    assert text.startswith(f"rank {dist.get_rank()}: Rotary was on the meta device")
    assert "the values of inverse in it are not initialized. " in text


@pytest.mark.spec("DEBUG-08")
@wrapper_apis
@ranks(2)
def test_wrapper_lists_tensors_that_param_init_fn_did_not_set(api: Api) -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=False)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with minifsdp.debug("meta"), said() as texts:
        api.unit(model, device_id=device(), param_init_fn=fill)
    (text,) = texts
    names = "0.bias, 1.weight, 1.bias, 1.running_mean, 1.running_var, 1.num_batches_tracked"
    assert f"the values of {names} in it are not initialized. " in text


@pytest.mark.spec("DEBUG-08", "DEBUG-09")
@wrapper_apis
@ranks(2)
def test_synced_meta_params_give_no_warning(api: Api) -> None:
    """The setup in which only one rank needs memory for the unsharded model."""
    plain = seeded() if dist.get_rank() == 0 else seeded().to("meta")

    def fill(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=False)

    with minifsdp.debug("meta"), said() as texts:
        model = api.shard(plain, sync_module_states=True, param_init_fn=fill, device_id=device())
        iterate(model)
    assert texts == []
    assert_same(full_values(model), full_values(api.shard()))


@pytest.mark.spec("DEBUG-09")
@all_apis
@ranks(2)
def test_a_buffer_without_values_is_refused_on_every_rank_at_the_first_forward(api: Api) -> None:
    with minifsdp.debug("meta"):
        with said():
            model = made(api, forgets=True)
        buffer = model.layers[1].inverse
        on_rank(0, lambda: buffer.fill_(1))
        for _ in range(2):
            assert_refused(model, "the values of 'layers.1.inverse' (rank 1) are not")
        buffer.fill_(1)
        iterate(model)


@pytest.mark.spec("DEBUG-09")
@all_apis
@ranks(2)
def test_a_row_of_a_parameter_without_values_is_refused_on_every_rank(api: Api) -> None:
    with minifsdp.debug("meta"):
        model = made(api)
        # The last elements are on rank 1.
        parameter: Any = [parameter for parameter in model.layers[1].parameters() if parameter.numel()][-1]
        shard = parameter.to_local() if api == FULLY_SHARD else parameter
        on_rank(1, lambda: shard.view(-1)[-6:].fill_(float("nan")))
        assert_refused(model, "the values of 'layers.1.weight' (rank 1) are not")


@pytest.mark.spec("DEBUG-09")
@ranks(2)
def test_uninitialized_buffer_of_a_root_without_parameters_is_reported() -> None:
    with minifsdp.debug("meta"):
        model = made(FULLY_SHARD, resets=(Rotary,))
        assert_refused(model, "the values of 'scale' (rank 0, 1) are not")
