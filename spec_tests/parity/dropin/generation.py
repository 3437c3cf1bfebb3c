"""Trains a tiny language model, evaluates it, and generates text from the wrapped model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

VOCABULARY, WIDTH, STEPS = 11, 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.recurrent(x)[0])


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def sentence(start):
    """Two sequences that count in steps of three, which are easy to learn."""
    return torch.stack([(start + 3 * torch.arange(9)) % VOCABULARY, (start + 1 + 3 * torch.arange(9)) % VOCABULARY])


def evaluate(model, device):
    model.eval()
    with torch.no_grad():
        tokens = sentence(5).to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    model.train()
    return loss.item()


def main(device):
    rank = dist.get_rank()
    report = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        torch.manual_seed(rank)
        model = FSDP(Writer(), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
        losses, written = [], []
        for step in range(STEPS):
            tokens = sentence(2 * step + rank).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 4 == 3:
                losses.append(evaluate(model, device))
                # Only the root's own parameters are summoned. The blocks all-gather theirs for each token.
                model.eval()
                with FSDP.summon_full_params(model, recurse=False, writeback=False):
                    written.append(model.module.generate(sentence(1)[:, :3].to(device), 5).tolist())
                model.train()
        report[strategy.name] = {"losses": losses, "written": written}
    return report
