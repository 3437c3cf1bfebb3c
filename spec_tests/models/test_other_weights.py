"""Programs that use parameters in unusual ways: hooks, changes in forward, other weights, and additions after sharding.

See ``nets.py`` for the model and for the ways in which it is sharded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from spec_tests.harness import device, ranks
from spec_tests.models import kinds, nets, values
from spec_tests.models.nets import Net
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

every_kind = pytest.mark.parametrize("kind", nets.ALL)
three_kinds = pytest.mark.parametrize("kind", nets.THREE)
named_kinds = pytest.mark.parametrize("kind", [kind for kind in nets.ALL if not kind.startswith("flat")])
wrapper_kinds = pytest.mark.parametrize("kind", [kind for kind in nets.ALL if not kind.startswith("fully_shard")])


def assert_equal_weights(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(values.full_values(model), values.named(plain))


# --- hooks of parameters ---


@pytest.mark.spec("PROG-40")
@every_kind
@ranks(2)
def test_a_hook_from_before_sharding_changes_the_unsharded_gradient(kind: str) -> None:
    plain = Net().to(device())
    model = copy.deepcopy(plain)
    shapes: list[torch.Size] = []
    for net in (plain, model):
        net.first.weight.register_hook(nets.mask)
        net.blocks[1].weight.register_hook(nets.mask)
        net.blocks[1].bias.register_hook(lambda gradient: shapes.append(gradient.shape))
    model = nets.sharded(kind, model)
    nets.train(plain, model)
    # Two steps of two models.
    assert shapes == [(8,)] * 4
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-41")
@named_kinds
@ranks(2)
def test_a_hook_from_after_sharding_changes_the_unsharded_gradient_until_it_is_removed(kind: str) -> None:
    plain, model = nets.pair(kind, Net())
    for _ in range(2):
        handles = [parameter.register_hook(nets.mask) for net in (plain, model) for parameter in net.parameters()]
        nets.train(plain, model, num_steps=1)
        assert_equal_weights(model, plain)
        for handle in handles:
            handle.remove()
        nets.train(plain, model, num_steps=1)
        assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-42")
@named_kinds
@ranks(2)
def test_a_post_accumulate_hook_from_before_sharding_is_called_with_the_sharded_parameter(kind: str) -> None:
    calls, model = [], Net()
    model.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append((p, p.grad is not None)))
    model = nets.sharded(kind, model)
    nets.backward(model)
    # A rank that stores no element of an original parameter has no gradient of it.
    owned = [p for name, p in model.named_parameters() if name.endswith("first.weight") and p.numel()]
    for (parameter, has_gradient), expected in zip(calls, owned, strict=True):
        assert parameter is expected
        assert has_gradient


@pytest.mark.spec("PROG-42")
@ranks(2)
def test_a_flat_parameter_warns_about_post_accumulate_hooks_of_the_parameters_that_it_replaces() -> None:
    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    words = r"(?s)\['first.weight'\].*register_post_accumulate_grad_hook\(\).*use_orig_params=True"
    with pytest.warns(UserWarning, match=words):
        nets.sharded("flat FULL_SHARD", model)


# --- forwards that change parameters ---


class Book(nn.Module):
    """Codes that move in forward: the same values on all ranks, or not."""

    def __init__(self, *, differs: bool = False, requires_grad: bool = False) -> None:
        super().__init__()
        self.book, self.differs = nn.Parameter(torch.zeros(5, 8), requires_grad), differs
        self.change = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.book[3].add_(self.change if self.differs else 1)
        return x + self.book.sum(0)


def clamp(module: Any, _: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.2, 0.2)


@pytest.mark.spec("PROG-43")
@pytest.mark.parametrize("kind", kinds.KINDS)
@ranks(2)
def test_equal_changes_in_forward_are_kept(kind: str) -> None:
    plain = Net(nn.Linear(8, 8, bias=False), Book())
    plain.blocks[0].register_forward_pre_hook(clamp)
    plain, model = nets.pair(kind, plain)
    nets.train(plain, model)
    assert_equal_weights(model, plain)
    for net in (plain, model):
        with torch.no_grad():
            net(nets.batch())
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-43")
@three_kinds
@ranks(2)
def test_the_rows_of_an_embedding_keep_their_largest_norm(kind: str) -> None:
    plain = nn.Sequential(nn.Embedding(5, 8, max_norm=0.5), nn.Linear(8, 2)).to(device())
    model = kinds.shard(kind, copy.deepcopy(plain), units=["0"])
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(2):
            net(torch.arange(4, device=device())).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-43")
@ranks(2)
def test_unchanged_values_keep_their_stored_precision() -> None:
    wrapped = FullyShardedDataParallel(Book(), mixed_precision=MixedPrecision(torch.bfloat16), device_id=device())
    policy = MixedPrecisionPolicy(torch.bfloat16)
    for model in (wrapped, fully_shard(Book().to(device()), mp_policy=policy)):
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().fill_(1 / 3)
        with torch.no_grad():
            model(nets.batch())
        expected = torch.full((5, 8), 1 / 3, device=device())
        expected[3] = torch.tensor(1 / 3).bfloat16() + 1
        assert torch.equal(values.full_values(model)["book"], expected)


DIFFERS = r"blocks\.1.*changed in place while they were unsharded.*ignored_"


@pytest.mark.spec("PROG-44")
@pytest.mark.parametrize(
    "kind", [*(kind for kind in kinds.KINDS if "NO_SHARD" not in kind), "fully_shard True one unit"]
)
@ranks(2)
def test_different_changes_in_forward_are_refused_by_name_on_every_rank(kind: str) -> None:
    book = Book(differs=True)
    model = nets.sharded(kind, Net(nn.Linear(8, 8), book))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DIFFERS):
            nets.backward(model)
    book.differs = False
    nets.backward(model)


@pytest.mark.spec("PROG-44", "HYB-04")
@pytest.mark.parametrize("kind", ["fully_shard HYBRID_SHARD", "flat HYBRID_SHARD", "original HYBRID_SHARD"])
@ranks(4)
def test_changes_that_differ_only_between_replicas_are_refused_on_every_rank(kind: str) -> None:
    book = Book(differs=True)
    book.change = dist.get_rank() // 2
    model = nets.sharded(kind, Net(nn.Linear(8, 8), book))
    with pytest.raises(RuntimeError, match=DIFFERS):
        nets.backward(model)


@pytest.mark.spec("PROG-44")
@three_kinds
@ranks(2)
def test_after_the_error_a_root_computes_with_the_values_from_before(kind: str) -> None:
    book = Book(differs=True)
    model = kinds.shard(kind, book)
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed in place while they were unsharded"):
        model(nets.batch())
    book.change = 0
    with torch.no_grad():
        assert torch.equal(model(nets.batch()), nets.batch())


@pytest.mark.spec("PROG-44")
@ranks(2)
def test_the_first_of_two_modules_with_equal_names_is_compared_as_well() -> None:
    model = nn.Sequential(Book(differs=True), Book())
    for modules in ([model[0], model[1]], model):
        fully_shard(modules)
    with pytest.raises(RuntimeError, match="changed in place while they were unsharded"):
        model(nets.batch())


@pytest.mark.spec("PROG-44")
@pytest.mark.parametrize("kind", ["flat FULL_SHARD one unit", "original FULL_SHARD one unit"])
@ranks(2)
def test_a_change_of_one_of_several_views_is_refused_with_the_remedy(kind: str) -> None:
    model = nets.sharded(kind, Net(nn.Linear(8, 8), Book(requires_grad=True)))
    with pytest.raises(RuntimeError, match=r"changes a parameter in place.*unit of its own"):
        nets.backward(model)


# --- parameters and modules that are added or replaced after sharding ---


@pytest.mark.spec("PROG-45")
@every_kind
@ranks(2)
def test_the_first_step_names_parameters_that_were_added_after_sharding(kind: str) -> None:
    net = Net()
    model = nets.sharded(kind, net)
    nets.train(model, num_steps=1)
    net.added = nn.Sequential(nn.Linear(8, 8))
    net.blocks[0].register_parameter("prompt", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="average their gradients") as caught:
        optimizer.step()
    (text,) = [str(warning.message) for warning in caught]
    for name in ("prompt", "added.0.weight", "added.0.bias"):
        assert f"'{name}' of " in text
    optimizer.step()  # Another warning would be an error.


@pytest.mark.spec("PROG-45")
@three_kinds
@ranks(2)
def test_ignored_parameters_and_other_models_cause_no_warning(kind: str) -> None:
    net, other = Net(), nn.Linear(8, 8)
    option = "ignored_params" if kind == "fully_shard True" else "ignored_states"
    model = nets.sharded(kind, net, **{option: set(net.head.parameters())})
    # A warning would be an error.
    torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1).step()


@pytest.mark.spec("PROG-46")
@pytest.mark.parametrize("change", ["parametrization", "pruning"])
@pytest.mark.parametrize(
    ("kind", "remedy", "other_remedy"),
    [
        ("fully_shard True", "fully_shard()", "summon_full_params"),
        ("original FULL_SHARD", "summon_full_params", "fully_shard()"),
    ],
)
@ranks(2)
def test_the_remedy_for_a_replaced_parameter_is_one_of_the_same_api(
    kind: str, remedy: str, other_remedy: str, change: str
) -> None:
    net = Net()
    model = nets.sharded(kind, net)
    if change == "pruning":
        prune.identity(net.head, "weight")
    else:
        net.head.register_parameter("weight", nn.Parameter(torch.zeros(8, 8)))
    with pytest.raises(RuntimeError, match=r"'head.weight' of Linear was removed or replaced") as caught:
        model(nets.batch())
    assert remedy in str(caught.value)
    assert other_remedy not in str(caught.value)


# --- other weights for a unit ---


class Hyper(nn.Module):
    """A module that computes the weights of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.generate, self.inner = nn.Linear(8, 64), nn.Linear(8, 8, bias=False)
        self.name = "weight"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.generate(x[0]).view(8, 8)
        return torch.func.functional_call(self.inner, {self.name: weight}, (x,))


@pytest.mark.spec("PROG-47")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "weight") for kind in nets.THREE),
        ("flat FULL_SHARD", "_fsdp_wrapped_module.weight"),
        ("original FULL_SHARD", "_fsdp_wrapped_module.weight"),
    ],
)
@ranks(2)
def test_a_functional_call_of_a_unit_is_refused(kind: str, name: str) -> None:
    plain = Hyper()
    model = kinds.shard(kind, plain, units=["inner"])
    plain.name = name
    with pytest.raises((RuntimeError, AttributeError), match=r"weight.*functional_call\(\)"):
        model(nets.batch())


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_functional_call_of_a_part_of_a_unit_is_right() -> None:
    plain = Hyper().to(device())
    model = fully_shard(copy.deepcopy(plain))
    nets.train(plain, model)
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_module_that_is_set_on_the_wrapper_instead_of_the_wrapped_module_is_refused() -> None:
    model = nets.sharded("original FULL_SHARD", Net())
    with pytest.raises(
        AttributeError, match=r"(?s)'head' belongs to the wrapped Net.*wrapper\.module.*E-set-on-wrapper"
    ):
        model.head = nn.Linear(8, 8)


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_new_module_a_tensor_or_a_setting_may_be_set_on_the_wrapper() -> None:
    net = Net()
    net.temperature = None
    model = nets.sharded("original FULL_SHARD", net)
    layer = model.head
    model.loss = nn.CrossEntropyLoss()
    for temperature in (torch.tensor(2.0), torch.tensor(3.0)):
        model.temperature = temperature
        assert model.temperature is temperature
    # A setting may have the name of a layer.
    model.head = "regression"
    assert (model.head, model.module.head) == ("regression", layer)


# --- parameters in a second place ---


class Twice(nn.Module):
    """A layer that reads its parameters from other places than its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(8)), nn.Parameter(torch.zeros(8))
        self.places = {"all": [self.weight, self.bias]}
        vars(self)["alias"] = self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.places["all"]
        return x @ weight.T + self.alias.sum() + bias


@pytest.mark.spec("PROG-48", "FWD-03")
@every_kind
@ranks(2)
def test_parameters_in_a_list_a_dict_or_another_attribute_are_the_unsharded_ones_in_forward(kind: str) -> None:
    plain, model = nets.pair(kind, Net(Twice(), nn.Linear(8, 8)))
    # The second forward reads the values of the first step.
    nets.train(plain, model)
    assert_equal_weights(model, plain)


class OnlyStores(nn.Sequential):
    """A module without parameters of its own, which stores one of an inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = [inner.weight]


@pytest.mark.spec("PROG-48")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_parameter_of_an_inner_unit_in_a_list_warns_without_parameters_of_its_own(use_orig_params: bool) -> None:
    model = OnlyStores(nn.Linear(8, 8, device=device()))
    model[0] = FullyShardedDataParallel(model[0], device_id=device(), use_orig_params=use_orig_params)
    with pytest.warns(UserWarning, match="stores parameters that belong to a unit"):
        FullyShardedDataParallel(model, device_id=device(), use_orig_params=use_orig_params)


@pytest.mark.spec("PROG-48", "PROG-01")
@wrapper_kinds
@ranks(2)
def test_parameters_in_a_second_place_are_the_full_ones_inside_summon_full_params(kind: str) -> None:
    plain, model = nets.pair(kind, Net(Twice(), nn.Linear(8, 8)))
    nets.train(plain, model, num_steps=1)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.add_(0.5)
        torch.testing.assert_close(model(nets.batch()), plain(nets.batch()))
    nets.train(plain, model, num_steps=1)
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-49")
@three_kinds
@ranks(2)
def test_a_place_that_cannot_be_updated_causes_a_warning_with_its_name(kind: str) -> None:
    block = nn.Linear(8, 8)
    block.kept = (block.weight,)
    net = Net(block)
    net.of_a_unit = [block.weight]
    with (
        pytest.warns(UserWarning, match="'kept' of Linear"),
        pytest.warns(UserWarning, match="'of_a_unit' of Net"),
    ):
        nets.sharded(kind, net)
