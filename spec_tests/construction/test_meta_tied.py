"""Shared and ignored parameters of a model that is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel as FSDP

flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])


class Tied(nn.Module):
    """A language model whose embedding and head share their weight."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(6, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 6, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def remembering() -> Callable[[nn.Module], None]:
    """Gives memory to each parameter once, and registers the same one again in the next module."""
    given: dict[nn.Parameter, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                given.setdefault(parameter, nn.Parameter(torch.ones_like(parameter, device=device())))
                setattr(module, name, given[parameter])

    return fill


@pytest.mark.spec("PROG-66")
@pytest.mark.parametrize("has_units", [False, True])
@flat_or_original
@pytest.mark.parametrize("start", ["real on rank 0", "reset", "remembering"])
@ranks(2)
def test_a_shared_parameter_on_the_meta_device_is_still_shared(start: str, keep: bool, has_units: bool) -> None:
    is_real = start == "real on rank 0" and dist.get_rank() == 0
    fill = remembering() if start == "remembering" else None
    if start == "real on rank 0" and not is_real:
        fill = lambda module: module.to_empty(device=device(), recurse=False)  # noqa: E731
    with torch.device(device() if is_real else "meta"):
        model: Any = Tied()
    options: Any = {"param_init_fn": fill, "use_orig_params": keep, "sync_module_states": True, "device_id": device()}
    if has_units:
        model.middle = FSDP(model.middle, **options)
    model, plain = FSDP(model, **options), Tied().to(device())
    state = model.state_dict()
    if start == "real on rank 0":
        assert_close(state, plain.state_dict(), rtol=0, atol=0)
    assert torch.equal(state["embedding.weight"], state["head.weight"])
    plain.load_state_dict(state)
    for each in (model, plain):
        each(torch.arange(3, device=device())).square().mean().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.spec("PROG-66")
@flat_or_original
@ranks(2)
def test_a_shared_parameter_on_the_meta_device_in_two_units_is_refused(keep: bool) -> None:
    with torch.device("meta"):
        model = Tied(bias=False)
    model.embedding = FSDP(model.embedding, use_orig_params=keep, device_id=device())
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: .*weight"):
        FSDP(model, use_orig_params=keep, device_id=device())


@pytest.mark.spec("PROG-67")
@pytest.mark.parametrize("start", ["reset", "remembering"])
@flat_or_original
@ranks(2)
def test_an_ignored_parameter_on_the_meta_device_stays_ignored(keep: bool, start: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fill = remembering() if start == "remembering" else None
    options: Any = {"ignored_states": [model[0].bias], "param_init_fn": fill, "use_orig_params": keep}
    wrapper: Any = FSDP(model, device_id=device(), **options)
    assert any(wrapper.module[0].bias is parameter for parameter in wrapper.parameters())
    assert wrapper._unit.layout.sharding.padded_numel == 15 + 10 + 2 + 1
    wrapper(torch.ones(2, 3, device=device())).sum().backward()
    assert wrapper.module[0].bias.grad.shape == (5,)
