"""Inputs whose parts depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from minifsdp.engine.precision import cast_floating, move


@pytest.mark.pure
@pytest.mark.spec("DEV-08", "MP-17")
def test_an_unsorted_packed_sequence_keeps_both_of_its_orders() -> None:
    sequences = [torch.full((length,), float(length)) for length in (1, 3, 2)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    assert packed.sorted_indices.tolist() != packed.unsorted_indices.tolist()
    for mapped in (move(torch.device("cpu"), packed), cast_floating(torch.bfloat16, packed)):
        assert type(mapped) is PackedSequence
        values, lengths = pad_packed_sequence(mapped, batch_first=True)
        assert lengths.tolist() == [1, 3, 2]
        assert values.float().tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0]]
