"""A small GPT over bytes, built so that each block makes a good unit.

The vocabulary is the 256 values of a byte, so it needs no tokenizer. It has two kinds of parameters, which belong to
different units:

* the blocks, which have the same shape and run one after the other. Each block is one unit. It is all-gathered, used
  and freed, and the next block reuses its memory;
* the embedding and the final norm. They belong to the *root* unit, which is all-gathered first and stays unsharded
  until the end of the forward. This is necessary, because the embedding is used twice: at the beginning it maps bytes
  to vectors, and at the end it is the matrix that maps vectors to scores. A parameter with two uses must be in a unit
  that is unsharded during both.

Worked example, ``width=144`` and 5 blocks: a block has ``12 * 144**2 + 4 * 144 = 249,408`` parameters, the root
``256 * 144 + 2 * 144 = 37,152``, together 1,284,192. With FULL_SHARD, each of two ranks stores one half of the
parameters. During a step, the root and at most two blocks are unsharded, which is 42 % of the model. With more blocks,
this fraction is smaller.

Attention uses rotary position embeddings: it rotates queries and keys, two numbers at a time, by an angle that grows
with the position. Then the previous byte has the same relative rotation at every position. A model of this size learns
this in seconds. With a learned vector for each position, it needs minutes (1.6 compared to 2.2 nats per byte after 300
steps).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "VOCABULARY", "Block", "generate"]

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a two-layer perceptron; both read a normalised residual stream and add their results to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Returns the stream ``(batch, length, width)`` plus this block's results; ``turn`` is from `turns`."""
        x = x + self.attention(self.norm1(x), turn)
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor, turn: Tensor) -> Tensor:
        """Causal self-attention."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(turned(query, turn), turned(key, turn), value, is_causal=True)
        return self.mix(attended.transpose(1, 2).reshape(batch, length, width))


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates pairs of numbers; ``x`` is ``(..., length, 2 * n)`` and ``turn``, from `turns`, ``(2, length, n)``."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    # In low precision, the angles are still float32.
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def turns(length: int, half_head: int, device: torch.device) -> Tensor:
    """Cosines and sines, ``(2, length, half_head)``; the angles grow with the position."""
    speeds = 1000.0 ** (-torch.arange(half_head, device=device) / half_head)
    angles = torch.arange(length, device=device)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])


class GPT(nn.Module):
    """Maps bytes to scores for the next byte at each position.

    Args:
        width: size of the residual stream between the blocks.
        num_blocks: number of blocks, each a unit in addition to the root.
        num_heads: attention heads; ``width`` must be a multiple of twice their number.
    """

    def __init__(self, *, width: int, num_blocks: int, num_heads: int) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(f"width must be a multiple of 2 * heads, got width {width} and {num_heads} heads")
        self.half_head = width // num_heads // 2
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        # The embedding is also the output matrix. With torch's default std of 1.0 the initial loss would be very large.
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """Maps integers ``text``, ``(batch, length)``, to scores ``(batch, length, 256)`` of the byte after each."""
        x = self.embedding(text)
        turn = turns(text.shape[1], self.half_head, text.device)
        for block in self.blocks:
            x = block(x, turn)
        # The second use of the embedding. It is still unsharded, because it belongs to the root unit.
        return F.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, *, num_bytes: int, context: int, seed: int, device: torch.device
) -> bytes:
    """Continues ``prompt`` by ``num_bytes`` bytes.

    **All ranks must call it**, with the same arguments: each forward all-gathers the units. If a rank does not call it,
    the other ranks hang. All ranks use generators with the same seed, so all ranks compute the same text, and any rank
    can print it.

    Args:
        model: maps bytes to scores like `GPT.forward`; may be sharded.
        prompt: at least one byte.
        num_bytes: how many bytes to add.
        context: the number of previous bytes from which the model predicts the next one.
        seed: seed of the generator that samples the bytes.
        device: the device of the model.
    """
    # On the CPU, because a CUDA generator gives different numbers for the same seed.
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        scores = model(text[:, -context:])[0, -1]
        # The temperature is below 1, because small models assign too much probability to unlikely bytes.
        chances = torch.softmax(scores.float().cpu() / 0.7, dim=0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, drawn[None].to(device)], dim=1)
    return bytes(text[0].tolist())
