"""The shapes of published models, as far as the FLOPs of a training step need them.

An MPT of llm-foundry has a token embedding, which is also the output matrix, learned positions, and blocks of a fused
attention and of an MLP with the factor 4, all with biases. Worked example, MPT 7b with width d = 4096 and 32 layers::

    embedding and positions    (50,368 + 2,048) * d              =   214,695,936
    matrices of the blocks     32 * 12 * d * d                   = 6,442,450,944
    biases and norms           (32 * (9 + 4) + 2) * d            =     1,712,128
    together                                                       6,658,859,008    as stated by the source
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LLAMAS", "MPTS", "Shape", "mpt_parameters"]

MPT_VOCABULARY = 50368


@dataclass(frozen=True)
class Shape:
    """The numbers that define the FLOPs of a decoder.

    Attributes:
        layers, width: the number of blocks, and the size of a token's vector.
        vocabulary: the number of tokens.
    """

    layers: int
    width: int
    vocabulary: int


MPTS = {
    "mpt-1b": Shape(24, 2048, MPT_VOCABULARY),
    "mpt-3b": Shape(32, 2560, MPT_VOCABULARY),
    "mpt-7b": Shape(32, 4096, MPT_VOCABULARY),
    "mpt-13b": Shape(40, 5120, MPT_VOCABULARY),
    "mpt-30b": Shape(48, 7168, MPT_VOCABULARY),
    "mpt-70b": Shape(80, 8192, MPT_VOCABULARY),
}
# `llama3-7b` is the name of KempnerForge. Its stated MFU needs the parameters of Llama 3 8B.
LLAMAS = {"llama3-8b": Shape(32, 4096, 128256), "llama3-7b": Shape(32, 4096, 128256)}


def mpt_parameters(shape: Shape, sequence_length: int) -> int:
    """The number of parameters of an MPT with learned positions for ``sequence_length`` tokens."""
    width, layers = shape.width, shape.layers
    vectors = shape.vocabulary + sequence_length + 13 * layers + 2
    return vectors * width + 12 * layers * width * width
