"""A model that is sharded on the meta device and then allocated and initialized shard by shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from spec_tests.harness import device, ranks
from spec_tests.models.running import loss_of
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import fully_shard


class Part(nn.Module):
    """A weight and a buffer, and a method that initializes both in place, also if the weight is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 4))
        self.register_buffer("shift", torch.empty(5))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Values that show their position: element (i, j) is i + j / 8."""
        values = torch.arange(5.0)[:, None] + torch.arange(4.0) / 8
        if isinstance(self.weight, DTensor):
            self.weight.to_local().copy_(values.chunk(2)[dist.get_rank()])
        else:
            self.weight.copy_(values)
        self.shift.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.shift


class Whole(nn.Module):
    """Two parts and a method that initializes both, which a model has to provide itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def reset_parameters(self) -> None:
        for part in self.parts:
            part.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](x)[:, :4])


@pytest.mark.spec("FS2-META-01", "FS2-META-02", "FS2-META-03", "MIG-18")
@pytest.mark.parametrize("was_called", [False, True])
@ranks(2)
def test_a_model_on_meta_gets_memory_with_to_empty_and_values_with_reset_parameters(was_called: bool) -> None:
    with torch.device("meta"):
        model: Any = Whole()
    for module in (*model.parts, model):
        fully_shard(module)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().is_meta
        assert (parameter.shape, parameter.placements) == ((5, 4), (Shard(0),))
        assert parameter.to_local().shape == ((3, 4), (2, 4))[dist.get_rank()]
    assert all(buffer.is_meta for buffer in model.buffers())
    x = torch.ones(3, 4, device=device())
    if was_called:
        with pytest.raises(RuntimeError, match=r"parts\.0\.weight"):
            model(x)
    model.to_empty(device=device())
    model.reset_parameters()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device().type}
    plain = Whole().to(device())
    assert_same(full_values(model), named(plain))
    assert torch.equal(model(x), plain(x))
    loss_of(model(x)).backward()
    assert {parameter.grad.placements for parameter in model.parameters()} == {(Shard(0),)}


# On a GPU torch draws different random numbers on each rank; on the CPU the caller has to seed the ranks differently.
ON_CPU = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
DRAWS = pytest.mark.not_simulated("its random generator has no offset, which DTensor changes on a GPU")


@pytest.mark.spec("FS2-META-02", "FS2-META-04")
@ON_CPU
@DRAWS
@ranks(2)
def test_layers_of_torch_initialize_their_shards_and_a_container_does_not() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    for module in (*model, model):
        fully_shard(module)
    model.to_empty(device=device())
    with pytest.raises(AttributeError, match="reset_parameters"):
        model.reset_parameters()
    if device().type == "cpu":
        torch.manual_seed(dist.get_rank())
    for layer in model:
        layer.reset_parameters()
    weight = model[0].weight.full_tensor()
    assert weight.abs().max() <= 1 / 8**0.5
    assert weight.unique().numel() == weight.numel(), "the ranks drew different values"
    loss_of(model(torch.ones(2, 8, device=device()))).backward()


@pytest.mark.spec("FS2-META-01", "FS2-META-02")
@pytest.mark.parametrize("is_first", [False, True])
@ranks(2)
def test_a_unit_can_have_some_of_its_parameters_on_meta(is_first: bool) -> None:
    kept, late = nn.Linear(4, 4, bias=False, device=device()), nn.Linear(4, 4, bias=False, device="meta")
    values = torch.arange(16.0, device=device()).view(4, 4) / 16
    with torch.no_grad():
        kept.weight.copy_(values)
    model = fully_shard(nn.Sequential(*((late, kept) if is_first else (kept, late))))
    late.to_empty(device=device())
    with torch.no_grad():
        late.weight.fill_(0.25)
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    assert torch.equal(weights[is_first], values)
    x = torch.ones(1, 4, device=device())
    assert torch.equal(model(x), x @ weights[0].t() @ weights[1].t())
