"""A small transformer language model and its batches, for the programs in this folder."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LENGTH = 19, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, around_block=lambda block: block):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(around_block(Block()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_of(model, number, rank, device):
    """The loss of the batch with this number of a rank."""
    dice = torch.Generator().manual_seed(1000 * rank + number)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=dice).to(device)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
