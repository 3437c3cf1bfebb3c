"""``param_dtype_override_fn``: parameters of one unit that compute in their own dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import minifsdp
from spec_tests.harness import device, ranks

BF16 = torch.bfloat16
LIBRARIES = {"minifsdp": minifsdp}
if "param_dtype_override_fn" in {field.name for field in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)}:
    LIBRARIES["torch"] = torch_fsdp


class Normed(nn.Module):
    """A layer, and a norm that computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [self.linear.weight.dtype, self.norm.weight.dtype]
        return self.norm(self.linear(x).to(self.norm.weight.dtype))


def keep_vectors(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.ndim == 1 else None


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32, device=device()).view(4, 8) * (dist.get_rank() + 1)


@pytest.mark.spec("NEW-30")
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_chosen_parameters_compute_in_their_own_dtype(library: str, keeps: bool) -> None:
    fsdp: Any = LIBRARIES[library]
    policy = fsdp.MixedPrecisionPolicy(BF16, torch.float32, param_dtype_override_fn=keep_vectors)
    model: Any = fsdp.fully_shard(Normed().to(device()), mp_policy=policy, reshard_after_forward=not keeps)
    plain = Normed().to(device())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    model(batch()).square().sum().backward()

    assert model.seen == [BF16, torch.float32]
    linear = nn.functional.linear(batch().bfloat16(), plain.linear.weight.bfloat16())
    plain.norm(linear.float()).square().sum().backward()
    for name, parameter in plain.named_parameters():
        expected = parameter.grad.clone()
        dist.all_reduce(expected)
        sharded = dict(model.named_parameters())[name]
        assert (sharded.dtype, sharded.grad.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(sharded.grad.full_tensor(), expected / 2)
    optimizer.step()
    model(batch())
    assert model.seen[2:] == [BF16, torch.float32]


@pytest.mark.spec("NEW-30")
@ranks(2)
def test_each_parameter_is_asked_for_once_and_a_policy_of_torch_counts() -> None:
    asked: list[tuple[int, ...]] = []

    def choose(parameter: nn.Parameter) -> torch.dtype:
        asked.append(tuple(parameter.shape))
        return parameter.dtype if parameter.ndim == 1 else BF16

    @dataclasses.dataclass(frozen=True)
    class Policy(torch_fsdp.MixedPrecisionPolicy):
        param_dtype_override_fn: Any = None

    policy = Policy(BF16, param_dtype_override_fn=choose)
    model = minifsdp.fully_shard(Normed().to(device()), mp_policy=policy)
    for _ in range(2):
        model(batch()).sum().backward()
    assert asked == [(8, 8), (8,), (8,)]
    assert model.norm.weight.grad.dtype is torch.float32


@pytest.mark.spec("NEW-30")
@pytest.mark.parametrize("chosen", [torch.float16, "bfloat16", 0])
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_another_dtype_is_an_error(library: str, chosen: Any) -> None:
    fsdp: Any = LIBRARIES[library]
    policy = fsdp.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: chosen)
    with pytest.raises(ValueError, match=r"param_dtype_override_fn (must return|returned)"):
        fsdp.fully_shard(Normed().to(device()), mp_policy=policy)
