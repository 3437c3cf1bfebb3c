"""A small transformer language model in bfloat16, with gradient accumulation and clipping."""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

VOCABULARY, WIDTH, LENGTH, MICRO_BATCHES, STEPS = 19, 16, 8, 3, 4


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
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.mask.to(x.dtype))
        return self.head(self.norm(x))


def micro_batch(step, index, rank, device):
    dice = torch.Generator().manual_seed(10_000 * rank + 100 * step + index)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=dice).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def main(device):
    rank = dist.get_rank()
    torch.manual_seed(0)

    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FSDP(
        Transformer(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=bf16,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    report = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for index in range(MICRO_BATCHES):
            tokens, targets = micro_batch(step, index, rank, device)
            is_last = index == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        dist.all_reduce(total)
        report["losses"].append(total.item() / dist.get_world_size())
        report["norms"].append(norm.item())

    with FSDP.summon_full_params(model, writeback=False):
        report["weights"] = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    return report
