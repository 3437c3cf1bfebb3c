"""A small GPT over bytes, cut so that each block makes a good unit.

The vocabulary is the 256 values of a byte: no tokenizer to download, and none to train before the training. A model of
this kind has two sorts of parameters, and they ask for different units:

* the blocks, all of one shape, used one after the other. One block is one unit: gathered, used, freed, and its memory
  serves the next;
* the rest: the embedding and the final norm. They stay with the *root* unit, which is gathered first and kept until the
  end of the forward, and that is not a matter of taste. The embedding is used at both ends: on the way in it turns
  bytes into vectors, on the way out it is the matrix that turns vectors into scores. One parameter with two uses must
  lie in a unit that is whole during both.

Worked example, ``width=144`` and 5 blocks: a block has ``12 * 144**2 + 4 * 144 = 249,408`` parameters, the root
``256 * 144 + 2 * 144 = 37,152``, together 1,284,192. Two ranks with FULL_SHARD store one half of each. While a step
runs, a rank holds the root and at most two blocks in full, 42 % of the model, and with more blocks that share goes
down.

Where a byte stands is told to the attention by turning its queries and keys, two numbers at a time, by an angle that
grows with the position. "The byte before me" is then the same small turn everywhere, which a model of this size learns
in seconds; with a learned vector for each position it needs minutes (when this was
chosen, 1.6 against 2.2 nats per byte after 300 steps).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "VOCABULARY", "Block", "generate"]

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a perceptron of two layers; each reads a normalised copy of the stream and adds its result."""

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
        """The stream ``(batch, length, width)`` with this block's contributions; ``turn`` is from `turns`."""
        x = x + self.attention(self.norm1(x), turn)
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor, turn: Tensor) -> Tensor:
        """What each byte takes over from the bytes before it and from itself."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(turned(query, turn), turned(key, turn), value, is_causal=True)
        return self.mix(attended.transpose(1, 2).reshape(batch, length, width))


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates pairs of numbers; ``x`` is ``(..., length, 2 * n)`` and ``turn``, from `turns`, ``(2, length, n)``."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def turns(length: int, half_head: int, device: torch.device) -> Tensor:
    """Cosines and sines, ``(2, length, half_head)``: clock hands, fast ones for near bytes, slow ones for far."""
    speeds = 1000.0 ** (-torch.arange(half_head, device=device) / half_head)
    angles = torch.arange(length, device=device)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])


class GPT(nn.Module):
    """Bytes in, scores for the byte after each of them out.

    Args:
        width: numbers for each byte in the stream between the blocks.
        num_blocks: blocks, and therefore units besides the root.
        num_heads: attention heads; ``width`` must be a multiple of twice their number.
    """

    def __init__(self, *, width: int, num_blocks: int, num_heads: int) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(f"width must be a multiple of 2 * heads, so that numbers pair up: {width} and {num_heads}")
        self.half_head = width // num_heads // 2
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        # The embedding is the matrix of the scores, too. With torch's default of 1.0 the first guesses would be wild.
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """Scores ``(batch, length, 256)`` for the byte after each byte of ``text``, ``(batch, length)`` of integers."""
        x = self.embedding(text)
        turn = turns(text.shape[1], self.half_head, text.device)
        for block in self.blocks:
            x = block(x, turn)
        # The second use of the embedding. No block may have freed it in between: it belongs to the root unit.
        return F.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, *, num_bytes: int, context: int, seed: int, device: torch.device
) -> bytes:
    """Continues ``prompt`` by ``num_bytes`` bytes.

    **All ranks must call it**, with the same arguments: each forward gathers the units from everybody, and a rank that
    stayed away would leave the others waiting for its shards. Since all ranks also draw from equal generators, all come
    to the same text, and any of them may print it.

    Args:
        model: from bytes to scores, as `GPT.forward`; may be sharded.
        prompt: at least one byte.
        num_bytes: how many bytes to add.
        context: only the last ``context`` bytes are read for each new one.
        seed: of the generator that draws the bytes.
        device: where the model computes.
    """
    # On the CPU on purpose: a CUDA generator would draw other bytes for the same seed.
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        scores = model(text[:, -context:])[0, -1]
        # A little colder than the model's own distribution: small models are too generous to unlikely bytes.
        chances = torch.softmax(scores.float().cpu() / 0.7, dim=0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, drawn[None].to(device)], dim=1)
    return bytes(text[0].tolist())
