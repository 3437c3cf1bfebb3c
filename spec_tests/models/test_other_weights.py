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
from spec_tests.models.kinds import shard
from spec_tests.models.nets import (
    ALL,
    Net,
    assert_equal_weights,
    backward,
    batch,
    every_kind,
    named_kinds,
    sharded,
    step,
    three_apis,
    warnings_of,
    weights_of,
)
from spec_tests.subject import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

# --- hooks of parameters ---


def mask(gradient: Tensor) -> Tensor:
    return gradient * torch.linspace(0, 1, gradient.numel(), device=gradient.device).view(gradient.shape)


@pytest.mark.spec("PROG-40")
@every_kind
@ranks(2)
def test_a_hook_from_before_sharding_changes_the_unsharded_gradient(kind: str) -> None:
    plain = Net().to(device())
    model = copy.deepcopy(plain)
    calls: list[torch.Size] = []
    for net in (plain, model):
        net.first.weight.register_hook(mask)
        handle = net.blocks[1].weight.register_hook(mask)
        net.blocks[1].bias.register_hook(lambda gradient: calls.append(gradient.shape))
    model = sharded(kind, model)
    for _ in range(2):
        for net in (plain, model):
            step(net)
    assert calls == [torch.Size([8])] * 4
    assert_equal_weights(model, plain)
    handle.remove()


@pytest.mark.spec("PROG-41")
@named_kinds
@ranks(2)
def test_a_hook_from_after_sharding_changes_the_unsharded_gradient_until_it_is_removed(kind: str) -> None:
    plain = Net().to(device())
    model = sharded(kind, copy.deepcopy(plain))
    for _ in range(2):
        handles = [parameter.register_hook(mask) for net in (plain, model) for parameter in net.parameters()]
        for net in (plain, model):
            step(net)
        assert_equal_weights(model, plain)
        for handle in handles:
            handle.remove()
        for net in (plain, model):
            step(net)
        assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-42")
@named_kinds
@ranks(2)
def test_a_post_accumulate_hook_from_before_sharding_is_called_with_the_sharded_parameter(kind: str) -> None:
    calls = []
    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append((p, p.grad is not None)))
    model = sharded(kind, model)
    backward(model)
    # A rank that stores no element of an original parameter has no gradient of it.
    owned = [p for name, p in model.named_parameters() if name.endswith("first.weight") and p.numel()]
    pairs = zip(calls, owned, strict=True)
    assert all(parameter is expected and has for (parameter, has), expected in pairs)


@pytest.mark.spec("PROG-42")
@ranks(2)
def test_a_flat_parameter_warns_about_post_accumulate_hooks_of_the_parameters_that_it_replaces() -> None:
    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    (text,) = warnings_of(lambda: sharded("flat FULL_SHARD", model))
    assert "['first.weight']" in text
    assert "register_post_accumulate_grad_hook()" in text
    assert "use_orig_params=True" in text


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


with_units = pytest.mark.parametrize("kind", [kind for kind in ALL if not kind.endswith("one unit")])


@pytest.mark.spec("PROG-43")
@with_units
@ranks(2)
def test_equal_changes_in_forward_are_kept(kind: str) -> None:
    plain = Net(nn.Linear(8, 8, bias=False), Book()).to(device())
    plain.blocks[0].register_forward_pre_hook(clamp)
    model = sharded(kind, copy.deepcopy(plain))
    for _ in range(2):
        for net in (plain, model):
            step(net)
        assert_equal_weights(model, plain)
    for net in (plain, model):
        with torch.no_grad():
            net(batch())
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-43")
@ranks(2)
def test_the_rows_of_an_embedding_keep_their_largest_norm() -> None:
    for kind in ("fully_shard True", "flat FULL_SHARD", "original FULL_SHARD"):
        plain = nn.Sequential(nn.Embedding(5, 8, max_norm=0.5), nn.Linear(8, 2)).to(device())
        model = shard(kind, copy.deepcopy(plain), units=["0"])
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
    precision: Any = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(Book(), mixed_precision=precision, device_id=device())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for model in (wrapped, fully_shard(Book(), mp_policy=policy)):
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().fill_(1 / 3)
        with torch.no_grad():
            model(batch())
        expected = torch.full((5, 8), 1 / 3)
        expected[3] = torch.tensor(1 / 3).bfloat16() + 1
        torch.testing.assert_close(weights_of(model)["book"].cpu(), expected, rtol=0, atol=0)


@pytest.mark.spec("PROG-44")
@pytest.mark.parametrize(
    "kind",
    [kind for kind in ALL if not (kind.startswith(("flat", "original")) and kind.endswith(("unit", "NO_SHARD")))],
)
@ranks(2)
def test_different_changes_in_forward_are_refused_by_name_on_every_rank(kind: str) -> None:
    model = sharded(kind, Net(nn.Linear(8, 8), Book(differs=True)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"blocks\.1.*changed in place while they were unsharded.*ignored_"):
            backward(model)
    model.get_submodule("blocks.1" if "fully" in kind else "_fsdp_wrapped_module.blocks.1.module").differs = False
    backward(model)


@pytest.mark.spec("PROG-44", "HYB-04")
@pytest.mark.parametrize("kind", ["fully_shard HYBRID_SHARD", "flat HYBRID_SHARD", "original HYBRID_SHARD"])
@ranks(4)
def test_changes_that_differ_only_between_replicas_are_refused_on_every_rank(kind: str) -> None:
    net = Net(nn.Linear(8, 8), Book(differs=True))
    net.blocks[1].change = dist.get_rank() // 2
    model = sharded(kind, net)
    with pytest.raises(RuntimeError, match=r"blocks\.1.*changed in place while they were unsharded.*ignored_"):
        backward(model)


@pytest.mark.spec("PROG-44")
@three_apis
@ranks(2)
def test_after_the_error_a_root_computes_with_the_values_from_before(kind: str) -> None:
    book = Book(differs=True)
    model = shard(kind, book)
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed in place while they were unsharded"):
        model(batch())
    book.differs, book.change = True, 0
    with torch.no_grad():
        assert torch.equal(model(batch()), batch())


@pytest.mark.spec("PROG-44")
@ranks(2)
def test_the_first_of_two_modules_with_equal_names_is_compared_as_well() -> None:
    model = nn.Sequential(Book(differs=True), Book())
    fully_shard([model[0], model[1]])
    fully_shard(model)
    with pytest.raises(RuntimeError, match="changed in place while they were unsharded"):
        model(batch())


@pytest.mark.spec("PROG-44")
@pytest.mark.parametrize("kind", ["flat FULL_SHARD one unit", "original FULL_SHARD one unit"])
@ranks(2)
def test_a_change_of_one_of_several_views_is_refused_with_the_remedy(kind: str) -> None:
    model = sharded(kind, Net(nn.Linear(8, 8), Book(requires_grad=True)))
    with pytest.raises(RuntimeError, match=r"changes a parameter in place.*unit of its own"):
        backward(model)


# --- parameters and modules that are added or replaced after sharding ---


@pytest.mark.spec("PROG-45")
@every_kind
@ranks(2)
def test_the_first_step_names_parameters_that_were_added_after_sharding(kind: str) -> None:
    model = sharded(kind, Net())
    inside = model if isinstance(model, Net) else model.module
    step(model)
    inside.added = nn.Sequential(nn.Linear(8, 8))
    inside.blocks[0].register_parameter("prompt", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (text,) = warnings_of(optimizer.step)
    assert "'added.0.weight' of " in text
    assert "'added.0.bias' of " in text
    assert "'prompt' of " in text
    assert "average their gradients" in text
    assert warnings_of(optimizer.step) == []


@pytest.mark.spec("PROG-45")
@ranks(2)
def test_ignored_parameters_and_other_models_cause_no_warning() -> None:
    for kind in ("flat FULL_SHARD", "original FULL_SHARD", "fully_shard True"):
        net, other = Net(), nn.Linear(8, 8)
        ignored: Any = set(net.head.parameters())
        options = {"ignored_params" if kind == "fully_shard True" else "ignored_states": ignored}
        model = sharded(kind, net, **options)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        assert warnings_of(optimizer.step) == []


@pytest.mark.spec("PROG-46")
@pytest.mark.parametrize("change", ["parametrization", "pruning"])
@ranks(2)
def test_the_remedy_for_a_replaced_parameter_is_one_of_the_same_api(change: str) -> None:
    for kind in ("fully_shard True", "original FULL_SHARD"):
        model = sharded(kind, Net())
        head = model.get_submodule("head" if kind == "fully_shard True" else "_fsdp_wrapped_module.head")
        if change == "pruning":
            prune.identity(head, "weight")
        else:
            head.register_parameter("weight", nn.Parameter(torch.zeros(8, 8)))
        with pytest.raises(RuntimeError, match=r"'head.weight' of Linear was removed or replaced") as caught:
            model(batch())
        assert ("summon_full_params" in str(caught.value)) is (kind == "original FULL_SHARD")
        assert ("fully_shard()" in str(caught.value)) is (kind == "fully_shard True")


# --- other weights for a unit ---


class Hyper(nn.Module):
    """A module that computes the weights of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.generate, self.inner = nn.Linear(8, 64), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.generate(x[0]).view(8, 8)
        prefix = "_fsdp_wrapped_module." if hasattr(self.inner, "_fsdp_wrapped_module") else ""
        result: Tensor = torch.func.functional_call(self.inner, {f"{prefix if LONG[0] else ''}weight": weight}, (x,))
        return result


LONG = [False]


@pytest.mark.spec("PROG-47")
@pytest.mark.parametrize("is_long", [False, True])
@ranks(2)
def test_a_functional_call_of_a_unit_is_refused_and_of_a_part_of_a_unit_is_right(is_long: bool) -> None:
    LONG[0] = is_long
    for kind in ("fully_shard True", "flat FULL_SHARD", "original FULL_SHARD"):
        for is_unit in (True, False):
            torch.manual_seed(0)
            plain = Hyper().to(device())
            model: Any = copy.deepcopy(plain)
            model = shard(kind, model, units=["inner"] if is_unit else [])
            if is_unit:
                with pytest.raises((RuntimeError, AttributeError), match=r"weight.*functional_call\(\)"):
                    model(batch())
            elif kind == "fully_shard True":
                for net in (plain, model):
                    step(net)
                assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_module_that_is_set_on_the_wrapper_instead_of_the_wrapped_module_is_refused() -> None:
    model = sharded("original FULL_SHARD", Net())
    with pytest.raises(AttributeError, match=r"'head' belongs to the wrapped Net.*Set it on wrapper\.module"):
        model.head = nn.Linear(8, 8)
    model.loss = nn.CrossEntropyLoss()


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_setting_of_the_program_may_have_the_name_of_a_layer() -> None:
    model = sharded("original FULL_SHARD", Net())
    layer = model.head
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


class InTuple(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.kept = (self.weight,)


@pytest.mark.spec("PROG-48")
@every_kind
@ranks(2)
def test_parameters_in_a_list_a_dict_or_another_attribute_are_the_unsharded_ones_in_forward(kind: str) -> None:
    plain = Net(Twice(), nn.Linear(8, 8)).to(device())
    model = sharded(kind, copy.deepcopy(plain))
    for _ in range(2):
        for net in (plain, model):
            step(net)
    assert_equal_weights(model, plain)


class OnlyStores(nn.Module):
    """A module without parameters of its own, which stores one of an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kept = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


@pytest.mark.spec("PROG-48")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_parameter_of_an_inner_unit_in_a_list_warns_without_parameters_of_its_own(use_orig_params: bool) -> None:
    model = OnlyStores().to(device())
    model.inner = FullyShardedDataParallel(model.inner, device_id=device(), use_orig_params=use_orig_params)
    with pytest.warns(UserWarning, match="stores parameters that belong to a unit"):
        FullyShardedDataParallel(model, device_id=device(), use_orig_params=use_orig_params)


@pytest.mark.spec("PROG-48", "PROG-01")
@pytest.mark.parametrize("kind", [kind for kind in ALL if not kind.startswith("fully_shard")])
@ranks(2)
def test_parameters_in_a_second_place_are_the_full_ones_inside_summon_full_params(kind: str) -> None:
    plain = Net(Twice(), nn.Linear(8, 8)).to(device())
    model = sharded(kind, copy.deepcopy(plain))
    for net in (plain, model):
        step(net)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.add_(0.5)
        torch.testing.assert_close(model(batch()), plain(batch()))
    for net in (plain, model):
        step(net)
    assert_equal_weights(model, plain)


@pytest.mark.spec("PROG-49")
@ranks(2)
def test_a_place_that_cannot_be_updated_causes_a_warning_with_its_name() -> None:
    for kind in ("flat FULL_SHARD", "original FULL_SHARD", "fully_shard True"):
        net = Net(InTuple())
        net.of_a_unit = [net.blocks[0].weight]
        texts = warnings_of(lambda kind=kind, net=net: sharded(kind, net))
        assert ["'kept' of InTuple" in text or "'of_a_unit' of Net" in text for text in texts] == [True, True]
