"""Registrations of parameters: the layout finds each parameter once, also if tied, and updates every registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp.engine.layout import owned_parameters
from spec_tests.engine.small import draw, shard_each
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Tied, chain


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
    message = rf"rank {dist.get_rank()}.*'1\.down\.weight' of Linear was removed or replaced.*summon_full_params\(\)"
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        model(draw(0))
