"""The sizes of published transformers, by name.

These models differ only in the options of `Shape`. The number of parameters of each model equals the published one.

Worked example, parameters of a block of Llama 3 8B, with width 4096, 32 heads, 8 heads of keys and values, and an
intermediate width of 14336: attention 2 * 4096**2 + 2 * 4096 * 1024, perceptron 3 * 4096 * 14336, two norms 2 * 4096;
together 218 112 000.

*In torch:* nothing comparable.

Spec: SIMULATE-04.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from minifsdp.engine.messages import message


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer.

    Attributes:
        layers, width, heads, vocabulary: as usual; ``layers`` counts those of one stack.
        kv_heads: heads of keys and values; ``None`` for as many as heads.
        intermediate: the width inside the perceptron; ``None`` for four times the width.
        head_width: the width of a head; ``None`` for ``width / heads``.
        gated: whether the perceptron has three matrices instead of two.
        biases: whether matrices and norms have biases.
        rms: whether norms are RMSNorm instead of LayerNorm.
        tied: whether the output matrix is the token embedding.
        positions: the number of learned positions; 0 for none.
        encoder: whether there is an encoder with as many layers.
        relative: the number of buckets of a relative position bias in each stack; 0 for none.
        sequence: the default number of tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    intermediate: int | None = None
    head_width: int | None = None
    gated: bool = False
    biases: bool = True
    rms: bool = False
    tied: bool = False
    positions: int = 0
    encoder: bool = False
    relative: int = 0
    sequence: int = 2048


_gpt2 = partial(Shape, vocabulary=50257, tied=True, positions=1024, sequence=1024)
_llama = partial(
    Shape,
    vocabulary=128256,
    kv_heads=8,
    gated=True,
    biases=False,
    rms=True,
    sequence=8192,
)
_mpt = partial(Shape, vocabulary=50368, tied=True, positions=2048)

SHAPES = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": Shape(96, 12288, 96, 50257, tied=True, positions=2048),
    "llama3-8b": _llama(32, 4096, 32, intermediate=14336),
    "llama3-70b": _llama(80, 8192, 64, intermediate=28672),
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    "t5-11b": Shape(
        24, 1024, 128, 32128, intermediate=65536, head_width=128, biases=False, rms=True, tied=True, encoder=True,
        relative=32, sequence=512,
    ),
}  # fmt: skip


def shape_of(text: str) -> Shape:
    """The shape that a text such as ``layers=4,width=256,heads=4,vocabulary=1000,gated=1`` describes.

    Raises:
        ValueError: if a name is unknown, a value is not a number, or one of the first four is missing.
    """
    known = {field.name for field in fields(Shape)}
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if wrong := [
        f"{name}={value}"
        for name, value in pairs
        if name not in known or not value.isdigit()
    ]:
        raise ValueError(
            message("simulate-size", name=wrong[0], known=", ".join(sorted(known)))
        )
    given: dict[str, Any] = {name: int(value) for name, value in pairs}
    if missing := [
        name for name in ("layers", "width", "heads", "vocabulary") if name not in given
    ]:
        raise ValueError(message("simulate-missing-size", text=text, name=missing[0]))
    return Shape(**given)
