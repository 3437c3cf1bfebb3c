"""The figures of cards and models, compared with a second source: formulas, and sizes from papers."""

from __future__ import annotations

import pytest

from minifsdp_tools.simulate.machine import CARDS
from minifsdp_tools.simulate.models import transformer
from minifsdp_tools.simulate.shapes import SHAPES

pytestmark = pytest.mark.pure

# Multiprocessors, and for each of them and clock: operations of tensor cores and in float32. Then the clocks of both in
# GHz, the pins of the memory, the gigabits of a pin in a second, and the stacks of memory with their gigabytes.
BUILT = {
    "A100-40": (108, 2048, 128, 1.41, 1.41, 5120, 2.43, 5 * 8),
    "A100-80": (108, 2048, 128, 1.41, 1.41, 5120, 3.186, 5 * 16),
    "H100": (132, 4096, 256, 1.83, 1.98, 5120, 5.234, 5 * 16),
    "H200": (132, 4096, 256, 1.83, 1.98, 6144, 6.25, 6 * 23.5),
}


@pytest.mark.spec("SIMULATE-06")
@pytest.mark.parametrize("name", CARDS)
def test_rates_of_a_card_follow_from_its_construction(name: str) -> None:
    units, tensor, single, tensor_clock, clock, pins, gigabits, gigabytes = BUILT[name]
    card = CARDS[name]
    # Data sheets round to three digits.
    assert card.matmul == pytest.approx(units * tensor * tensor_clock * 1e9, rel=0.005)
    assert card.matmul32 == pytest.approx(units * single * clock * 1e9, rel=0.005)
    assert card.bandwidth == pytest.approx(pins * gigabits * 1e9 / 8, rel=0.005)
    assert card.memory == gigabytes * 1e9


# From the papers of the models: the parameters in millions, and the width of an attention head.
PAPERS = {
    "gpt2": (124.4, 64), "gpt2-medium": (354.8, 64), "gpt2-large": (774.0, 64), "gpt2-xl": (1557.6, 64),
    "gpt3-175b": (175_000, 128), "llama3-8b": (8030, 128), "llama3-70b": (70_554, 128),
    "mpt-125m": (125, 64), "mpt-350m": (356, 64), "mpt-760m": (760, 128), "mpt-1b": (1316, 128), "mpt-3b": (2652, 128),
    "mpt-7b": (6659, 128), "mpt-13b": (12_854, 128), "mpt-30b": (29_975, 128), "mpt-70b": (64_862, 128),
    "t5-11b": (11_307, 128),
}  # fmt: skip


@pytest.mark.spec("SIMULATE-04")
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_has_the_parameters_and_the_heads_of_its_paper(name: str) -> None:
    shape, (millions, head_width) = SHAPES[name], PAPERS[name]
    module = transformer(shape, 1, None, "none", 1).module
    assert sum(parameter.numel() for parameter in module.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)
    assert (shape.head_width or shape.width / shape.heads) == head_width
    assert shape.heads % (shape.kv_heads or shape.heads) == 0
    assert not shape.positions or shape.sequence <= shape.positions


@pytest.mark.spec("SIMULATE-04")
def test_llama_3_has_eight_heads_of_keys_and_a_context_of_8192_tokens() -> None:
    for name in ("llama3-8b", "llama3-70b"):
        assert (SHAPES[name].kv_heads, SHAPES[name].sequence) == (8, 8192)
