"""Modules that take and return tensors in containers of many classes, with both APIs.

Each program runs on the sharded model and on an unsharded copy. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the copy.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, all_apis
from spec_tests.models.gradients import assert_learns_alike
from spec_tests.models.kinds import every_kind, shard
from spec_tests.models.values import assert_same
from spec_tests.subject import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)


class Registered:
    """A class that only ``torch.utils._pytree`` can open."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]


pytree.register_pytree_node(Registered, lambda r: (list(r.tensors), None), lambda items, _: Registered(*items))


class Pair(NamedTuple):
    """A tuple with field names."""

    first: Tensor
    second: Tensor


class Two:
    """The first and the second tensor are attributes. No container protocol can open it."""

    first: Tensor
    second: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return self.second if index else self.first


class Attributes(Two):
    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


@dataclasses.dataclass(frozen=True)
class Fields(Two):
    """A dataclass whose second field is not an argument of its constructor."""

    first: Tensor
    scale: dataclasses.InitVar[float]
    second: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        """The scale is no field."""


def fields(first: Tensor, second: Tensor) -> Fields:
    made = Fields(first, 1.0)
    object.__setattr__(made, "second", second)
    return made


@dataclasses.dataclass(init=False)
class OwnInit(Two):
    """A dataclass with its own constructor."""

    first: Tensor
    second: Tensor

    def __init__(self, both: tuple[Tensor, Tensor]) -> None:
        self.first, self.second = both


class OwnDict(dict[int, Any]):
    """A dict that also stores a tensor in an attribute."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__({0: first})
        self.second = second

    def __getitem__(self, index: int) -> Any:
        return self.second if index else super().__getitem__(0)


class OwnList(list[Tensor]):
    """A list that stores a label."""

    label = ""


def own_list(first: Tensor, second: Tensor) -> OwnList:
    made = OwnList([first, second])
    made.label = "kept"
    return made


class OwnTuple(tuple[Tensor, ...]):
    """A tuple without field names."""

    __slots__ = ()


Make = Callable[[Tensor, Tensor], Any]
CONTAINERS: dict[str, Make] = {
    "registered": Registered,
    "deque": lambda first, second: collections.deque([first, second], maxlen=2),
    "dict inside a registered class": lambda first, second: Registered(first, {"x": second}),  # type: ignore[arg-type]
    "dict with an attribute": OwnDict,
    "OrderedDict": lambda first, second: collections.OrderedDict([(0, first), (1, second)]),
    "defaultdict": lambda first, second: collections.defaultdict(list, {0: first, 1: second}),
    "UserDict": lambda first, second: collections.UserDict({0: first, 1: second}),
    "list subclass": own_list,
    "tuple subclass": lambda first, second: OwnTuple([first, second]),
    "named tuple": Pair,
    "nested, with a set": lambda first, second: [{"x": first}, {"x": second, "rest": [({"nothing"}, None)]}],
    "dataclass": fields,
    "dataclass with its own constructor": lambda first, second: OwnInit((first, second)),
}


def get(container: Any, index: int) -> Tensor:
    value = container[index]
    return value["x"] if isinstance(value, dict) else value


class Gives(nn.Module):
    """Returns two tensors in a container. The first does not depend on the second."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.first, self.second, self.make = nn.Linear(8, 8), nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(torch.tanh(self.first(x)), torch.tanh(self.second(x)))


class Takes(nn.Module):
    """Has a container and a tensor as inputs. Only the container leads to the second weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, container: Any, x: Tensor) -> Tensor:
        return self.first(x) + torch.tanh(self.second(get(container, 0) * 2 + get(container, 1)))


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.gives, self.takes = nn.Linear(8, 8), Gives(make), Takes()

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        result: Tensor = self.takes(self.gives(x), x)
        return result


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device())


def square_loss(model: Any) -> Tensor:
    return model(batch()).square().mean()


@pytest.mark.spec("PROG-80", "FS2-13")
@every_kind
@ranks(2)
def test_outputs_and_inputs_in_any_container_train_as_the_plain_model(kind: str) -> None:
    for make in CONTAINERS.values():
        plain = Net(make).to(device())
        model = shard(kind, copy.deepcopy(plain), ["start", "gives", "takes"])
        assert_learns_alike(plain, model, square_loss)


@pytest.mark.spec("FS2-13")
@ranks(2)
def test_units_without_detected_inputs_and_outputs_are_reduced() -> None:
    plain = Net(Attributes).to(device())
    # There is no output gradient whose hook could trigger the all-gather in backward.
    model = shard("fully_shard False", copy.deepcopy(plain), ["start", "gives", "takes"])
    assert_learns_alike(plain, model, square_loss)


@pytest.mark.spec("PROG-80")
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["fully_shard True", "flat FULL_SHARD"])
@ranks(2)
def test_the_loss_may_use_one_tensor_of_the_container(kind: str, index: int) -> None:
    for make in (*CONTAINERS.values(), Attributes):
        plain = Gives(make).to(device())
        model = shard(kind, copy.deepcopy(plain), ["first"])
        assert_learns_alike(plain, model, lambda net: get(net(batch()), index).square().mean())


@pytest.mark.spec("PROG-80")
@every_kind
@ranks(2)
def test_a_unit_that_returns_a_sparse_tensor_trains(kind: str) -> None:
    class GivesSparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to_sparse()

    class ReadsSparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.head = GivesSparse(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.block(x).to_dense())

    plain = ReadsSparse().to(device())
    assert_learns_alike(plain, shard(kind, copy.deepcopy(plain), ["block"]), square_loss)


@pytest.mark.spec("FS2-13", "MP-17")
@pytest.mark.parametrize("depth", [0, 1, 3, 6, 12])
@all_apis
@ranks(2)
def test_inputs_are_cast_and_outputs_train_at_each_depth_of_containers(api: Api, depth: int) -> None:
    def packed(value: Any) -> Any:
        for level in range(depth):
            value = ([value], (value, None), {0: value})[level % 3]
        return value

    def unpacked(value: Any) -> Tensor:
        for _ in range(depth):
            value = value[0]
        return value

    class Packs(nn.Linear):
        def forward(self, x: Any) -> Any:
            return packed(super().forward(unpacked(x)))

    plain = nn.Sequential(Packs(8, 8)).to(device())
    precision = {"param_dtype": torch.float64, "cast_forward_inputs": True}
    model = api.shard(copy.deepcopy(plain), unit_classes=(Packs,), precision=precision)
    plain.double()
    for net, x in ((plain, batch().double()), (model, batch())):
        output = unpacked(net(packed(x)))
        assert output.dtype is torch.float64
        output.square().mean().backward()
    expected = {name: parameter.grad.float() for name, parameter in plain.named_parameters()}
    assert_same(api.gradients(model), expected, bitwise=True)


def dtypes_seen_by(takes: nn.Module) -> list[torch.dtype]:
    """The dtypes of the tensors in the container, in the forward of ``takes``."""
    seen: list[torch.dtype] = []
    takes.register_forward_pre_hook(lambda _, args: seen.extend((get(args[0], 0).dtype, get(args[0], 1).dtype)))
    return seen


@pytest.mark.spec("PROG-81")
@pytest.mark.parametrize("name", CONTAINERS)
@ranks(2)
def test_mixed_precision_casts_tensors_in_any_container(name: str) -> None:
    model = Net(CONTAINERS[name]).to(device())
    seen = dtypes_seen_by(model.takes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model.gives, mp_policy=policy)
    fully_shard(model.takes, mp_policy=policy)
    container = model.gives(batch())
    assert [get(container, index).dtype for index in (0, 1)] == [torch.float32] * 2
    assert getattr(container, "label", "kept") == "kept"
    assert getattr(container, "maxlen", 2) == 2
    model.takes(container, batch()).sum().backward()
    assert seen == [torch.bfloat16] * 2
    # The same with the wrapper.
    takes = Takes().to(device())
    seen = dtypes_seen_by(takes)
    wrapper = FullyShardedDataParallel(takes, mixed_precision=MixedPrecision(torch.bfloat16), device_id=device())
    wrapper(CONTAINERS[name](batch(), batch()), batch()).sum().backward()
    assert seen == [torch.bfloat16] * 2


class Remembers(nn.Module):
    """Adds its result to the container that the caller passes, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = torch.tanh(self.lin(x))
        cache.tensors.append(x)
        return x


@pytest.mark.spec("PROG-82")
@pytest.mark.parametrize("trains", [True, False])
@ranks(2)
def test_a_module_may_add_to_a_registered_container_of_its_caller(trains: bool) -> None:
    def run(layers: Any) -> tuple[Registered, Tensor]:
        cache, x = Registered(), batch()
        for layer in layers:
            x = layer(x, cache)
        return cache, x + sum(cache.tensors)

    plain = nn.ModuleList(Remembers() for _ in range(3)).to(device())
    model = copy.deepcopy(plain)
    for layer in model:
        # The cast has nothing to do.
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    if trains:
        assert_learns_alike(plain, model, lambda net: run(net)[1].square().mean())
    with torch.set_grad_enabled(trains):
        assert len(run(model)[0].tensors) == 3
