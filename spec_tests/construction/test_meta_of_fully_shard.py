"""A model that is sharded on the meta device and then allocated and initialized shard by shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from spec_tests.harness import device, ranks
from spec_tests.subject import fully_shard


class Part(nn.Module):
    """A weight and a buffer, and a method that initializes both in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 4))
        self.register_buffer("shift", torch.empty(5))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(0.25)
        self.shift.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.shift


@pytest.mark.spec("FS2-META-01", "FS2-META-02", "FS2-META-03", "MIG-18")
@pytest.mark.parametrize("was_called", [False, True])
@ranks(2)
def test_a_model_on_meta_gets_memory_with_to_empty_and_values_with_reset_parameters(was_called: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Part(), nn.Flatten())
    for module in (model[0], model):
        fully_shard(module)
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.placements) == ((5, 4), (Shard(0),))
    assert (weight.to_local().shape, weight.to_local().is_meta) == (((3, 4), (2, 4))[dist.get_rank()], True)
    assert model[0].shift.is_meta
    x = torch.ones(3, 4, device=device())
    if was_called:
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            model(x)
    model.to_empty(device=device())
    model[0].reset_parameters()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device().type}
    output = model(x)
    assert output.tolist() == [[4 * 0.25 + 0.5] * 5] * 3
    output.sum().backward()
    assert model[0].weight.grad.placements == (Shard(0),)


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
    model(torch.ones(2, 8, device=device())).sum().backward()


@pytest.mark.spec("FS2-META-01", "FS2-META-02")
@pytest.mark.parametrize("is_first", [False, True])
@ranks(2)
def test_a_unit_can_have_some_of_its_parameters_on_meta(is_first: bool) -> None:
    kept, late = nn.Linear(4, 4, bias=False, device=device()), nn.Linear(4, 4, bias=False, device="meta")
    values = kept.weight.detach().clone()
    model = fully_shard(nn.Sequential(*((late, kept) if is_first else (kept, late))))
    late.to_empty(device=device())
    with torch.no_grad():
        late.weight.fill_(0.25)
    assert torch.equal(kept.weight.full_tensor(), values)
    x, quarters = torch.ones(1, 4, device=device()), torch.full((4, 4), 0.25, device=device())
    expected = x @ quarters @ values.t() if is_first else x @ values.t() @ quarters
    assert torch.equal(model(x), expected)
