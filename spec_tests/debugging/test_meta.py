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


class Rotary(nn.Module):
    """A linear layer and a table of frequencies. ``sets_table``: whether ``reset_parameters`` sets the table.

    As is usual for such tables, the constructor computes the values, and no checkpoint contains them.
    """

    def __init__(self, sets_table: bool) -> None:
        super().__init__()
        self.sets_table = sets_table
        self.weight = nn.Parameter(torch.zeros(6, 6))
        self.register_buffer("inverse", self._table(), persistent=False)
        self.register_buffer("position", torch.tensor([3]))

    @staticmethod
    def _table() -> Tensor:
        return torch.arange(6) / 8

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        self.position.fill_(3)
        if self.sets_table:
            self.inverse.copy_(self._table())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.inverse


class Model(nn.Module):
    """Two rotary layers in a root that has only a buffer. The second layer can leave its table uninitialized."""

    def __init__(self, sets_table: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rotary(True), Rotary(sets_table)])
        self.register_buffer("scale", torch.ones(1))

    def reset_parameters(self) -> None:
        self.scale.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def made(api: Api, sets_table: bool, **options: Any) -> Any:
    """Builds the model on the meta device, shards it, and initializes the parameters and buffers of all modules."""
    with torch.device("meta"):
        model = Model(sets_table)
    if api != FULLY_SHARD:
        return api.shard(model, unit_classes=(Rotary,), device_id=device(), **options)
    api.shard(model, unit_classes=(Rotary,))
    model.to_empty(device=device())
    reset_all(model)
    return model


def reset_all(model: nn.Module) -> None:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Rotary):
                # Functions of nn.init might not support shards, so set the values directly.
                module.weight.fill_(0.5)
                module.position.fill_(3)
                if module.sets_table:
                    module.inverse.copy_(Rotary._table())
            elif isinstance(module, Model):
                module.reset_parameters()


@pytest.mark.spec("DEBUG-08")
@pytest.mark.pure
def test_new_memory_contains_no_plausible_values_in_debug_mode() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(True), nn.Sequential(nn.BatchNorm1d(3)).to(torch.bfloat16))
    outer = nn.Sequential(nn.Linear(1, 1))
    with minifsdp.debug("meta"):
        model.to_empty(device="cpu")
        outer.to_empty(device="cpu", recurse=False)
    assert not outer[0].weight.isnan(), "the values of an inner module stay"
    assert all(parameter.isnan().all() for parameter in model.parameters())
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    integers = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    assert len(floats) == 3
    assert all(buffer.isnan().all() for buffer in floats)
    assert [buffer.tolist() for buffer in integers] == [[2**63 - 1], 2**63 - 1]


@pytest.mark.spec("DEBUG-08", "DEBUG-09")
@all_apis
@ranks(2)
def test_model_with_complete_reset_parameters_gives_no_warning(api: Api) -> None:
    with minifsdp.debug("meta"), said() as texts:
        model = made(api, True)
        iterate(model)
    assert texts == []


@pytest.mark.spec("DEBUG-08")
@wrapper_apis
@ranks(2)
def test_wrapper_lists_tensors_that_reset_parameters_did_not_set(api: Api) -> None:
    with minifsdp.debug("meta"), said() as texts:
        made(api, False)
    assert len(texts) == 1
    assert texts[0].startswith(f"rank {dist.get_rank()}: Rotary was on the meta device")
    assert "the values of inverse in it are not initialized. " in texts[0]


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
    assert len(texts) == 1
    names = "0.bias, 1.weight, 1.bias, 1.running_mean, 1.running_var, 1.num_batches_tracked"
    assert f"the values of {names} in it are not initialized. " in texts[0]


@pytest.mark.spec("DEBUG-08", "DEBUG-09")
@wrapper_apis
@ranks(2)
def test_synced_meta_params_give_no_warning(api: Api) -> None:
    """The setup in which only one rank needs memory for the unsharded model."""
    model = seeded()
    if dist.get_rank():
        model = model.to("meta")

    def fill(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=False)

    with minifsdp.debug("meta"), said() as texts:
        made = api.shard(model, sync_module_states=True, param_init_fn=fill, device_id=device())
        iterate(made)
    assert texts == []
    assert_same(full_values(made), full_values(api.shard()))


@pytest.mark.spec("DEBUG-09")
@all_apis
@ranks(2)
def test_a_buffer_without_values_is_refused_on_every_rank_at_the_first_forward(api: Api) -> None:
    with minifsdp.debug("meta"):
        with said():
            model = made(api, False)
        buffer = [buffer for name, buffer in model.named_buffers() if name.endswith("inverse")][1]
        on_rank(0, lambda: buffer.copy_(Rotary._table()))
        refused(model, "the values of 'layers.1.inverse' (rank 1) are not")
        refused(model, "the values of 'layers.1.inverse' (rank 1) are not")
        buffer.copy_(Rotary._table())
        iterate(model)


@pytest.mark.spec("DEBUG-09")
@all_apis
@ranks(2)
def test_a_parameter_without_values_is_refused_on_every_rank(api: Api) -> None:
    """One row of the second layer is not initialized, and only on the rank that stores it."""
    with torch.device("meta"):
        model = Model(api == FULLY_SHARD)
    with minifsdp.debug("meta"):
        with said() as texts:
            if api == FULLY_SHARD:
                api.unit(model)
                model.to_empty(device=device())
                reset_all(model)
                weight = model.layers[1].weight
                on_rank(1, lambda: weight.to_local()[-1].fill_(float("nan")))
            else:
                model = api.unit(model, param_init_fn=all_but_the_last_row, device_id=device())
        assert len(texts) == (api != FULLY_SHARD)
        refused(model, "the values of 'layers.1.weight' (rank 1) are not")


def all_but_the_last_row(module: nn.Module) -> None:
    module.to_empty(device=device(), recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, Rotary) and not module.sets_table:
        with torch.no_grad():
            module.inverse.copy_(Rotary._table())
            module.weight[-1].fill_(float("nan"))


@pytest.mark.spec("DEBUG-09")
@ranks(2)
def test_uninitialized_buffer_of_a_root_without_parameters_is_reported() -> None:
    with torch.device("meta"):
        model: Any = Model(True)
    with minifsdp.debug("meta"):
        FULLY_SHARD.shard(model, unit_classes=(Rotary,))
        model.to_empty(device=device())
        for layer in model.layers:
            reset_all(layer)
        refused(model, "the values of 'scale' (rank 0, 1) are not")


class Clipped(nn.Module):
    """Keeps sequences of any length, so the last bound is the largest integer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 6))
        self.register_buffer("bounds", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        self.bounds.copy_(torch.tensor([0, 512, torch.iinfo(torch.int64).max]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.spec("DEBUG-08", "DEBUG-09")
@wrapper_apis
@ranks(2)
def test_single_largest_integer_in_a_buffer_is_a_value(api: Api) -> None:
    with torch.device("meta"):
        model = Clipped()
    with minifsdp.debug("meta"), said() as texts:
        iterate(api.unit(model, device_id=device()))
    assert texts == []


def refused(model: Callable[..., Any], words: str) -> None:
    with pytest.raises(RuntimeError, match="the model is about to be used") as caught:
        model(batch())
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"rank {dist.get_rank()}: ")
