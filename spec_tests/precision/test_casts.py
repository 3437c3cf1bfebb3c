"""Casting changes every tensor in nested inputs and nothing else."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten

from minifsdp.cases.containers import cast_floating, map_tensors, move
from minifsdp.engine.precision import tensors_in

pytestmark = pytest.mark.pure
Pair = namedtuple("Pair", "left right")


def plus_one(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor + 1, value)


NUMBERS, FLOATS = torch.tensor([1, 2]), torch.tensor([0.5])
NESTED = [
    FLOATS,
    None,
    [NUMBERS, ("text", [FLOATS, []]), ()],
    {"a": Pair(True, FLOATS), "b": OrderedDict(x=[NUMBERS], y={})},
]


@pytest.mark.parametrize("value", NESTED)
def test_map_tensors_replaces_every_tensor_and_keeps_the_structure(value: Any) -> None:
    before, structure = tree_flatten(value)
    after, new_structure = tree_flatten(plus_one(value))
    assert new_structure == structure
    for leaf, new in zip(before, after, strict=True):
        assert torch.equal(new, leaf + 1) if isinstance(leaf, Tensor) else new is leaf
    assert (NUMBERS.tolist(), FLOATS.tolist()) == ([1, 2], [0.5]), "the caller's tensors do not change"
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(leaf) for leaf in before if isinstance(leaf, Tensor)]


@dataclass
class Batch:
    values: Tensor
    label: str
    rest: list[Tensor]
    size: int = field(init=False, default=3)


@dataclass(frozen=True)
class Frozen:
    values: Tensor


def test_dataclasses_are_rebuilt_with_other_fields() -> None:
    batch = Batch(torch.ones(2), "a", [torch.zeros(1)])
    batch.size = 5
    mapped = plus_one(batch)
    assert type(mapped) is Batch
    assert (mapped.values.tolist(), mapped.label, mapped.rest[0].tolist()) == ([2, 2], "a", [1])
    assert batch.values.tolist() == [1, 1]
    assert plus_one(Frozen(torch.ones(1))).values.tolist() == [2]
    assert [t.tolist() for t in tensors_in(batch)] == [[1, 1], [0]]
    # A class is not an instance.
    assert plus_one(Batch) is Batch
    assert list(tensors_in(Batch)) == []


class Output(OrderedDict[str, Any]):
    """A model output class: a mapping with its own constructor and attributes."""

    def __init__(self, logits: Any, *, origin: str) -> None:
        super().__init__(logits=logits)
        self.origin = origin

    def copy(self) -> Output:
        return Output(self["logits"], origin=self.origin)


class AttributeDict(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Refuses(dict[str, Any]):
    """A dict that cannot be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not with pickle")


class Forgets(UserDict[str, Any]):
    """A mapping whose pickle has no ``extra``."""

    extra = 0

    def __getstate__(self) -> Any:
        return {"data": self.data}


@pytest.mark.spec("DEV-08")
def test_mappings_of_each_kind_are_rebuilt() -> None:
    for kind in (UserDict, AttributeDict, Refuses, lambda **items: MappingProxyType(items)):
        given = kind(x=torch.ones(1))
        mapped = plus_one(given)
        assert type(mapped) is type(given)
        assert (mapped["x"].item(), given["x"].item()) == (2, 1)


@pytest.mark.spec("DEV-08")
def test_a_mapping_keeps_its_class_and_its_attributes() -> None:
    output, forgets = Output(torch.ones(2), origin="encoder"), Forgets(x=torch.ones(1))
    forgets.extra = 1
    mapped = plus_one(output)
    assert type(mapped) is Output
    assert (mapped.origin, mapped["logits"].tolist()) == ("encoder", [2, 2])
    assert output["logits"].tolist() == [1, 1]
    assert (plus_one(forgets)["x"].item(), plus_one(forgets).extra) == (2, 1)


class Two(tuple[Any, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> Two:
        return super().__new__(cls, (first, second))


@pytest.mark.spec("DEV-08")
def test_a_tuple_with_a_constructor_of_its_own_and_a_dataclass_that_refers_to_itself_are_rebuilt() -> None:
    one = torch.ones(1)
    pair = plus_one(Two(one, one))
    assert (type(pair), pair[1].item()) == (Two, 2)
    batch = Batch(one, "a", [])
    batch.again = batch
    batch.more = one
    assert plus_one(batch).values.item() == 2
    assert plus_one(batch).more is one, "an attribute that is no field is not an input"


@pytest.mark.spec("MP-17")
def test_a_tensor_that_need_not_change_is_not_copied() -> None:
    low, wave = torch.ones(2, dtype=torch.bfloat16), torch.ones(2) * 1j
    assert cast_floating(torch.bfloat16, (low,))[0] is low
    assert cast_floating(torch.bfloat16, {"wave": wave})["wave"] is wave
    assert move(torch.device("cpu"), (low,))[0] is low


@pytest.mark.spec("DEV-08")
def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    given = {"a": [pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False), torch.arange(3)], "b": "text"}
    result = move(torch.device("meta"), given)
    moved, numbers = result["a"]
    assert (numbers.device.type, result["b"]) == ("meta", "text")
    assert [moved.data.device.type, moved.sorted_indices.device.type] == ["meta", "meta"]
    assert moved.batch_sizes.tolist() == [2, 2, 1]


@pytest.mark.spec("DEV-08", "MP-17")
def test_an_unsorted_packed_sequence_keeps_both_of_its_orders() -> None:
    packed = pack_sequence([torch.full((length,), float(length)) for length in (1, 3, 2)], enforce_sorted=False)
    for mapped in (move(torch.device("cpu"), packed), cast_floating(torch.bfloat16, packed)):
        assert type(mapped) is PackedSequence
        values, lengths = pad_packed_sequence(mapped, batch_first=True)
        assert mapped.batch_sizes.dtype is torch.int64
        assert lengths.tolist() == [1, 3, 2]
        assert values.float().tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0]]
