"""Registrations of parameters: the layout finds each parameter once, also if tied, and updates every registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import Layout, ParamInfo, owned_parameters
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.precision import Precision
from spec_tests.engine.small import draw, shard_each
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, Tied, chain


@pytest.mark.pure
def test_parameters_are_found_in_the_order_of_the_walk_with_their_paths() -> None:
    block = MLP(3, 4)
    found = owned_parameters(block.named_modules(), set())
    assert [owned.path for owned in found.values()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert [owned.shape for owned in found.values()] == [(4, 3), (4,), (3, 4), (3,)]
    assert list(found) == list(block.parameters())


@pytest.mark.pure
@pytest.mark.spec("ORIG-15")
def test_tied_parameter_is_found_once_with_all_its_paths() -> None:
    model = Tied()
    found = owned_parameters(model.named_modules(), set())
    assert [owned.path for owned in found.values()] == [
        "first.weight",
        "first.bias",
        "middle.linear.weight",
        "middle.linear.bias",
        "last.bias",
    ]
    places = found[model.first.weight].attributes
    assert [(info.module, info.name, info.path) for info in places] == [
        (model.first, "weight", "first.weight"),
        (model.last, "weight", "last.weight"),
    ]


@pytest.mark.pure
def test_ignored_and_missing_parameters_are_skipped() -> None:
    block = MLP(3, 4)
    block.up.bias = None  # type: ignore[assignment]
    found = owned_parameters(block.named_modules(), {block.down.weight})
    assert [owned.path for owned in found.values()] == ["up.weight", "down.bias"]


@pytest.mark.pure
@pytest.mark.spec("CTOR-12")
def test_parameters_of_the_outermost_module_itself_have_no_prefix() -> None:
    linear = nn.Linear(2, 2)
    assert [owned.path for owned in owned_parameters([("", linear)], set()).values()] == ["weight", "bias"]


@pytest.mark.pure
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_module_with_second_weight_list_gets_both_updated(kind: type[nn.RNNBase]) -> None:
    module = kind(2, 3)
    for name in ("weight_ih_l0", "bias_hh_l0"):
        infos, replacement = owned_parameters([("", module)], set()).values(), torch.zeros(1)
        next(info for info in infos if info.name == name).update_second_places(replacement)
        index = module._flat_weights_names.index(name)
        assert module._flat_weights[index] is replacement


@pytest.mark.pure
def test_an_ordinary_module_has_no_second_place() -> None:
    info = ParamInfo(nn.Linear(2, 2), "weight", "weight", torch.Size((2, 2)))
    assert info.second_places == []
    info.update_second_places(torch.zeros(1))


@ranks(2)
@pytest.mark.spec("FWD-04")
def test_recurrent_unit_trains_with_unsharded_weights() -> None:
    torch.manual_seed(3)
    plain = nn.LSTM(3, 2).to(device())
    sharded = nn.LSTM(3, 2)
    sharded.load_state_dict(plain.state_dict())
    model: Any = shard_each(nn.Sequential(sharded))
    for _ in range(2):
        output, (hidden, _) = model(draw(0))
        expected, (expected_hidden, _) = plain(draw(0))
        torch.testing.assert_close(output, expected)
        (output.sum() + hidden.sum()).backward()
        (expected.sum() + expected_hidden.sum()).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    local_shard = model[0]._unit.layout.registered.shard.grad
    index = torch.distributed.get_rank()
    mine = flat[index * local_shard.numel() : (index + 1) * local_shard.numel()]
    torch.testing.assert_close(local_shard[: mine.numel()], mine)


@pytest.mark.pure
@pytest.mark.spec("CTOR-12")
def test_the_message_about_a_replaced_parameter_names_it_and_the_remedy() -> None:
    linear = nn.Linear(2, 2)
    parameters = owned_parameters([("head", linear)], set())
    layout = FlatLayout(linear, parameters, MeshGroups(None, None), torch.device("cpu"), Precision())
    layout.name = "blocks.3"
    message = str(layout.replaced_error(layout.parameters[0]))
    assert "'blocks.3.head.weight' of Linear was removed or replaced" in message
    assert "summon_full_params()" in message
    assert "rank 0" in message


@pytest.mark.spec("CTOR-12")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("how", ["removed", "replaced"])
@ranks(2)
def test_a_parameter_that_was_removed_or_replaced_is_noticed_at_the_next_forward(how: str, original: bool) -> None:
    model = shard_each(chain(2), use_orig_params=original)
    model(draw(0)).sum().backward()
    layer: Any = model.module[1].module.down
    del layer.weight
    if how == "replaced":
        layer.weight = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match=r"'1\.down\.weight' of Linear was removed or replaced"):
        model(draw(0))


@pytest.mark.pure
def test_a_layout_is_an_interface_and_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="cannot be instantiated"):
        Layout()  # type: ignore[misc]
