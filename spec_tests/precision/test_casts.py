"""Casting changes every tensor in nested inputs and nothing else."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from minifsdp.cases.containers import cast_floating, map_tensors, move
from minifsdp.engine.precision import tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    values: torch.Tensor
    label: str
    rest: list[torch.Tensor]
    size: int = field(init=False, default=3)


@dataclass(frozen=True)
class Frozen:
    values: torch.Tensor


class Output(OrderedDict):  # type: ignore[type-arg]
    """A model output class: a mapping with its own constructor and attributes."""

    def __init__(self, logits: Any, *, origin: str) -> None:
        super().__init__(logits=logits)
        self.origin = origin

    def copy(self) -> Output:
        made = Output(self["logits"], origin=self.origin)
        made.update(self)
        return made


leaves = st.one_of(
    st.integers(0, 3).map(lambda n: torch.full((2,), float(n))),
    st.integers(0, 3).map(lambda n: torch.full((2,), n)),
    st.none(),
    st.text(max_size=2),
    st.booleans(),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def skeleton(value: Any) -> Any:
    """The structure of a value: types, keys and all values that are not tensors."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return type(value), {key: skeleton(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [skeleton(item) for item in value]
    return value


@pytest.mark.pure
@given(nested)
def test_map_tensors_replaces_every_tensor_and_keeps_the_structure(value: Any) -> None:
    before = list(tensors_in(value))
    mapped = map_tensors(lambda t: t + 1, value)
    assert skeleton(mapped) == skeleton(value)
    after = list(tensors_in(mapped))
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old + 1)
    # The caller's containers do not change.
    assert all(a is b for a, b in zip(before, tensors_in(value), strict=True))


@pytest.mark.pure
def test_dataclasses_are_rebuilt_with_other_fields() -> None:
    batch = Batch(torch.ones(2), "a", [torch.zeros(1)])
    batch.size = 5
    mapped = map_tensors(lambda t: t + 1, batch)
    assert type(mapped) is Batch
    assert (mapped.values.tolist(), mapped.label, mapped.rest[0].tolist()) == ([2, 2], "a", [1])
    assert batch.values.tolist() == [1, 1]
    assert map_tensors(lambda t: t + 1, Frozen(torch.ones(1))).values.tolist() == [2]
    assert [t.tolist() for t in tensors_in(batch)] == [[1, 1], [0]]
    # A class is not an instance.
    assert map_tensors(lambda t: t + 1, Batch) is Batch
    assert list(tensors_in(Batch)) == []


@pytest.mark.pure
@pytest.mark.spec("DEV-08")
def test_a_mapping_with_a_constructor_of_its_own_keeps_its_class_and_its_attributes() -> None:
    output = Output(torch.ones(2), origin="encoder")
    mapped = map_tensors(lambda t: t + 1, output)
    assert type(mapped) is Output
    assert mapped.origin == "encoder"
    assert mapped["logits"].tolist() == [2, 2]
    assert output["logits"].tolist() == [1, 1]
    assert map_tensors(lambda t: t + 1, UserDict(a=torch.ones(1)))["a"].tolist() == [2]


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


class Two(tuple[Any, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> Two:
        return super().__new__(cls, (first, second))


@pytest.mark.pure
@pytest.mark.spec("DEV-08")
def test_containers_that_cannot_be_pickled_or_refer_to_themselves_are_rebuilt() -> None:
    def plus_one(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor + 1, value)

    one = torch.ones(1)
    batch = Batch(one, "a", [])
    batch.again = batch
    assert plus_one(batch).values.item() == 2
    assert plus_one(AttributeDict(x=one))["x"].item() == 2
    assert plus_one(MappingProxyType({"x": one}))["x"].item() == 2
    assert plus_one(Refuses(x=one))["x"].item() == 2
    forgets = Forgets(x=one)
    forgets.extra = 1
    assert (plus_one(forgets)["x"].item(), plus_one(forgets).extra) == (2, 1)
    pair = plus_one(Two(one, one))
    assert (type(pair), pair[1].item()) == (Two, 2)
    # An attribute that is no field is not an input.
    batch.more = one
    assert plus_one(batch).more is one


@pytest.mark.pure
@pytest.mark.spec("MP-17")
def test_only_floating_point_tensors_are_cast() -> None:
    numbers, mask, real, wave = torch.arange(3), torch.tensor([True]), torch.ones(2), torch.ones(2) * 1j
    cast = cast_floating(torch.bfloat16, {"tokens": numbers, "wave": wave, "rest": (mask, [real, "text", 1.5, None])})
    assert cast["wave"] is wave
    assert cast["tokens"] is numbers
    assert cast["rest"][0] is mask
    assert cast["rest"][1][0].dtype is torch.bfloat16
    assert cast["rest"][1][1:] == ["text", 1.5, None]


@pytest.mark.pure
def test_a_tensor_that_has_the_dtype_already_is_not_copied() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert cast_floating(torch.bfloat16, (tensor,))[0] is tensor
    assert move(torch.device("cpu"), (tensor,))[0] is tensor


@pytest.mark.pure
@pytest.mark.spec("DEV-08")
def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    given = {"a": [pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False), torch.arange(3)], "b": "text"}
    result = move(torch.device("meta"), given)
    moved, numbers = result["a"]
    assert (numbers.device.type, result["b"]) == ("meta", "text")
    assert [moved.data.device.type, moved.sorted_indices.device.type] == ["meta", "meta"]
    assert moved.batch_sizes.tolist() == [2, 2, 1]


@pytest.mark.pure
@pytest.mark.spec("DEV-08", "MP-17")
def test_an_unsorted_packed_sequence_keeps_both_of_its_orders() -> None:
    sequences = [torch.full((length,), float(length)) for length in (1, 3, 2)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    assert packed.sorted_indices.tolist() != packed.unsorted_indices.tolist()
    for mapped in (move(torch.device("cpu"), packed), cast_floating(torch.bfloat16, packed)):
        assert type(mapped) is PackedSequence
        values, lengths = pad_packed_sequence(mapped, batch_first=True)
        assert mapped.batch_sizes.dtype is torch.int64
        assert lengths.tolist() == [1, 3, 2]
        assert values.float().tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0]]
