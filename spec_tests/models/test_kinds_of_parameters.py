"""Optimizers that need whole parameters, sparse gradients, parameters without elements, attributes, memory formats.

See ``nets.py`` for the model and for the ways in which it is sharded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from spec_tests.harness import device, ranks
from spec_tests.models import nets, values
from spec_tests.models.modules import seeded
from spec_tests.models.nets import Net
from spec_tests.subject import CPUOffload, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

every_kind = pytest.mark.parametrize("kind", nets.ALL)


def assert_equal_weights(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(values.full_values(model), values.named(plain))


# --- optimizers ---


@pytest.mark.spec("PROG-50")
@ranks(2)
def test_a_step_of_fully_shard_before_the_reduction_warns_with_the_units() -> None:
    model = nets.sharded("fully_shard True", Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    nets.backward(model)
    before = values.full_values(model)
    words = r"(?s)SGD.step\(\) was called while gradients of the units.*blocks.0.*set_requires_gradient_sync\(True\)"
    with pytest.warns(UserWarning, match=words):
        optimizer.step()
    values.assert_same(values.full_values(model), before, bitwise=True)
    model.set_requires_gradient_sync(True)
    nets.backward(model)
    optimizer.step()  # Another warning would be an error.


class Lamb(torch.optim.SGD):
    """Only the name matters."""


# torch's LBFGS needs a function that computes the loss.
def closure() -> Tensor:
    return torch.zeros(())


@pytest.mark.spec("PROG-51")
@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor, Lamb])
@every_kind
@ranks(2)
def test_an_optimizer_that_needs_whole_parameters_warns_once_about_flat_shards(kind: str, make: Any) -> None:
    model = nets.sharded(kind, Net())
    optimizer = make(model.parameters(), lr=0.1)
    if not kind.startswith("fully_shard") and "NO_SHARD" not in kind:
        with pytest.warns(UserWarning, match=rf"(?s){make.__name__}.*1-D shards.*NO_SHARD"):
            optimizer.step(closure)
    # Another warning would be an error.
    optimizer.step(closure)


@pytest.mark.spec("PROG-52")
@ranks(2)
def test_a_policy_class_and_a_list_of_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="mp_policy should be a MixedPrecisionPolicy"):
        fully_shard(Net(), mp_policy=MixedPrecisionPolicy)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mixed_precision should be a MixedPrecision"):
        FullyShardedDataParallel(Net(), mixed_precision=MixedPrecision, device_id=device())  # type: ignore[arg-type]
    for module in (nn.ParameterList([torch.ones(3)]), nn.ParameterDict({"one": torch.ones(3)})):
        with pytest.raises(ValueError, match=type(module).__name__):
            fully_shard(module)


# --- sparse gradients, and parameters without elements ---


class Sparse(nn.Module):
    def __init__(self, kind: type[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(10, 8, sparse=True), nn.Linear(8, 8)])

    def forward(self, numbers: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](numbers))


@pytest.mark.spec("PROG-53")
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
@every_kind
@ranks(2)
def test_sparse_gradients_become_dense(kind: str, embedding: Any) -> None:
    with pytest.warns(UserWarning, match="weight' has sparse gradients"):
        plain, model = nets.pair(kind, Sparse(embedding))
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(2):
            net(torch.tensor([[1, 2], [1, 4]], device=device())).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-54")
@pytest.mark.parametrize("kind", [kind for kind in nets.ALL if kind.startswith("fully_shard")])
@ranks(2)
def test_the_optimizer_has_a_state_for_a_parameter_without_elements_and_loads_it(kind: str) -> None:
    model = Net()
    model.blocks[0].register_parameter("empty", nn.Parameter(torch.empty(0, 8)))
    model.blocks[0].register_forward_hook(lambda block, _, output: output + block.empty.sum())
    model = nets.sharded(kind, model)
    optimizer = torch.optim.AdamW(model.parameters())
    nets.backward(model)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["blocks.0.empty"]["exp_avg"].shape == (0, 8)
    set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), state)


# --- attributes of parameters ---


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.scale  # type: ignore[attr-defined]


@pytest.mark.spec("PROG-55")
@every_kind
@ranks(2)
def test_a_forward_reads_the_attributes_that_the_user_has_set_on_parameters(kind: str) -> None:
    plain = Net(Scaled(8, 8), nn.Linear(8, 8)).to(device())
    model = copy.deepcopy(plain)
    for net in (plain, model):
        net.blocks[0].weight.scale = 2.0
    block = model.blocks[0]
    model = nets.sharded(kind, model)
    assert block.weight.scale == 2.0
    nets.train(plain, model)
    assert_equal_weights(model, plain)


# --- memory formats ---


class Formats(nn.Module):
    """Two ``channels_last`` weights, a transposed weight, and a weight with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        for conv in (self.wide, self.deep):
            conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
        self.transposed, self.gaps = nn.Parameter(torch.empty(6, 16).t()), nn.Parameter(torch.empty(6, 16)[:, ::2])
        self.seen: list[tuple[int, ...]] = []

    def weights(self) -> list[Tensor]:
        return [self.wide.weight, self.deep.weight, self.transposed, self.gaps]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [weight.stride() for weight in self.weights()]
        return self.deep(self.wide(x.view(4, 2, 2, 2))).flatten(1) @ self.transposed @ self.gaps


# The weight with gaps becomes contiguous.
STRIDES: list[tuple[int, ...]] = [(18, 1, 6, 2), (9, 1, 3, 1), (1, 16), (8, 1)]
BFLOAT16, ON_CPU = MixedPrecision(param_dtype=torch.bfloat16), CPUOffload(offload_params=True)
WITH_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in nets.ALL if not kind.startswith("fully_shard")},
    "flat bfloat16": ("flat NO_SHARD", {"mixed_precision": BFLOAT16}),
    "original bfloat16": ("original FULL_SHARD", {"mixed_precision": BFLOAT16}),
    "flat offloaded": ("flat FULL_SHARD", {"cpu_offload": ON_CPU}),
    "original offloaded": ("original NO_SHARD", {"cpu_offload": ON_CPU}),
}
every_format = pytest.mark.parametrize("kind", WITH_FORMATS)


def formats_in(model: nn.Module) -> Formats:
    return next(module for module in model.modules() if isinstance(module, Formats))


def with_formats(kind: str) -> tuple[Any, Any]:
    """A plain model, and an equal sharded one. A hook changes the gradient of one weight."""
    # A deep copy would have other strides.
    plain, model = (seeded(lambda: Net(Formats(), nn.Linear(8, 8))) for _ in range(2))
    for net in (plain, model):
        formats_in(net).wide.weight.register_hook(nets.mask)
    name, options = WITH_FORMATS[kind]
    return plain, nets.sharded(name, model, **options)


@pytest.mark.spec("FWD-04", "PROG-40", "NOSYNC-02")
@every_format
@ranks(2)
def test_a_weight_has_its_memory_format_in_forward_and_learns_the_values_of_a_single_process(kind: str) -> None:
    plain, model = with_formats(kind)
    for _ in range(2):
        nets.backward(plain)
        with model.no_sync():
            nets.backward(model)
        nets.train(plain, model, num_steps=1)
        assert formats_in(model).seen == STRIDES
    assert formats_in(plain).seen[:3] == STRIDES[:3]
    if "bfloat16" not in kind:
        assert_equal_weights(model, plain)


@pytest.mark.spec("ORIG-04")
@ranks(2)
def test_an_unsharded_original_weight_its_gradient_and_its_states_have_its_memory_format() -> None:
    _, model = with_formats("original NO_SHARD")
    optimizer = torch.optim.Adam(model.parameters())
    nets.backward(model)
    optimizer.step()
    weights: list[Any] = formats_in(model).weights()
    for found in (weights, [w.grad for w in weights], [optimizer.state[w]["exp_avg"] for w in weights]):
        assert [tensor.stride() for tensor in found] == STRIDES


@pytest.mark.spec("SUMMON-02", "SUMMON-07", "SD-FULL-01")
@every_format
@ranks(2)
def test_a_full_parameter_has_its_memory_format_and_keeps_its_changes(kind: str) -> None:
    plain, model = with_formats(kind)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        assert [weight.stride() for weight in formats_in(model).weights()] == STRIDES
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name))
            parameter.copy_(torch.arange(float(parameter.numel())).view(parameter.shape))
    for value in model.state_dict().values():
        assert value.flatten().tolist() == [*range(value.numel())]
