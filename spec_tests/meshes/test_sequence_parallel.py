"""Tensor parallelism with sequence parallelism, and data parallelism around it, with a causal transformer.

Between the layers, each of the two ranks of the dimension ``cut`` has one half of the sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from spec_tests.harness import device, ranks
from spec_tests.models.values import full
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, fully_shard

WIDTH, NUM_TOKENS, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        heads = [layer(x).view(len(x), LENGTH, -1, 4).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.output(self.attention(self.norm(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(NUM_TOKENS, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def cut(mesh: DeviceMesh) -> Transformer:
    """The model, with its layers and its sequences split over the dimension ``cut``."""
    model = Transformer().to(device())
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["cut"], plan)
    for block in model.blocks:
        inner = {
            "norm": SequenceParallel(),
            **dict.fromkeys(("query", "key", "value"), ColwiseParallel()),
            "output": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["cut"], inner)
        # Attention needs the complete sequence, so the output of the norm is all-gathered.
        block.norm.register_forward_hook(lambda *given: given[-1].redistribute(placements=[Replicate()]))
    return model


def loss(model: nn.Module, step: int, copy: int) -> Tensor:
    dice = torch.Generator().manual_seed(10 * step + copy)
    tokens = torch.randint(NUM_TOKENS, (2, LENGTH), generator=dice).to(device())
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.spec("NEW-01", "FS2-04", "HYB-05")
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@ranks(8)
def test_replicas_of_a_model_with_sequence_parallelism_train_like_one_process(api: str) -> None:
    mesh = init_device_mesh(device().type, (2, 2, 2), mesh_dim_names=("copies", "data", "cut"))
    data = mesh["copies", "data"]
    model: Any = cut(mesh)
    plain = Transformer().to(device())
    if api == "fully_shard":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=data)
        clip = functools.partial(clip_grad_norm_, list(model.parameters()))
    else:
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
        model = FullyShardedDataParallel(model, device_mesh=data, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        clip = model.clip_grad_norm_
    ours, theirs = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain))

    for step in range(3):
        # Two ranks compute with each of the four batches.
        loss(model, step, dist.get_rank() // 2).backward()
        for copy in range(4):
            (loss(plain, step, copy) / 4).backward()
        torch.testing.assert_close(full(clip(0.5)), clip_grad_norm_(plain.parameters(), 0.5), rtol=1e-4, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()

    # The last loss depends on all parameters after three steps.
    torch.testing.assert_close(loss(model, 3, 0), loss(plain, 3, 0), rtol=1e-5, atol=0)
