"""Tensor and sequence parallelism: each rank has a part of every layer.

    torchrun --standalone --nproc-per-node 4 tutorials/parallel/tensor.py

Output: the loss of each step. It is the same with 1, 2 and 4 ranks, up to rounding. The ranks of "cut" compute with the
same rows, and each has some heads of attention, and some columns and rows of the matrices::

    rank 0: rows 0 to 3, heads 0 and 1       rank 1: rows 0 to 3, heads 2 and 3         <- "cut"
    rank 2: rows 4 to 7, heads 0 and 1       rank 3: rows 4 to 7, heads 2 and 3

Between the layers, each of them has a half of every sequence. They exchange activations in every layer, so they need a
fast network. ``parallelize_module`` comes first. Then ``fully_shard`` shards each part again over "data".
"""

import torch.distributed as dist
from loop import Backward, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

from minifsdp import fully_shard

WIDTH, WIDTH_OF_HEAD = 32, 8


class Block(nn.Module):
    """Attention. The number of heads is the number that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, tokens, WIDTH) to the same shape."""
        y = self.norm(x)
        heads = (
            layer(y).unflatten(-1, (-1, WIDTH_OF_HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


def build() -> tuple[nn.Module, list[list[nn.Parameter]], Backward]:
    num_ranks = dist.get_world_size()
    size = min(2, num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks // size, size), mesh_dim_names=("data", "cut"))
    model = nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "[12].norm": SequenceParallel(),
        "[12].output": RowwiseParallel(output_layouts=Shard(1)),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan |= {f"[12].{name}": ColwiseParallel() for name in ("query", "key", "value")}
    parallelize_module(model, mesh["cut"], plan)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    row = mesh.get_local_rank("data")

    def backward(x: Tensor, y: Tensor) -> Tensor:
        x, y = (part.chunk(num_ranks // size)[row] for part in (x, y))
        loss = functional.cross_entropy(model(x).mT, y)
        loss.backward()
        return loss / num_ranks  # Each part of the batch is on `size` ranks.

    return model, [list(model.parameters())], backward


if __name__ == "__main__":
    train(build)
