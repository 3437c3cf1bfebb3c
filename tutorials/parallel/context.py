"""Context parallelism: each rank has a part of every sequence.

    torchrun --standalone --nproc-per-node 4 tutorials/parallel/context.py

Output: the loss of each step. It is the same with 1, 2 and 4 ranks, up to rounding. Activations grow with the length of
a sequence, and FSDP does not shard them. So for long sequences, the ranks of "context" share each sequence::

    rank 0: rows 0 to 3, tokens 0 to 15      rank 1: rows 0 to 3, tokens 16 to 31      <- "context"
    rank 2: rows 4 to 7, tokens 0 to 15      rank 3: rows 4 to 7, tokens 16 to 31

Only attention needs other tokens, so the ranks of "context" all-gather keys and values. ``fully_shard`` shards over all
ranks: each has the gradient of its own tokens.
"""

import torch
import torch.distributed as dist
from loop import LENGTH, Backward, train
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from minifsdp import fully_shard

WIDTH, NUM_HEADS = 32, 4


class Block(nn.Module):
    """Attention and a small network. The ranks of ``group`` have consecutive parts of each sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank = group, group.rank()
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, tokens of this rank, WIDTH) to the same shape."""
        query, key, value = self.inputs(x).unflatten(-1, (3, NUM_HEADS, -1)).transpose(1, 3).unbind(2)
        # The gradient of the all-gather is a reduce-scatter: each rank gets the sum for its own keys and values.
        key, value = (all_gather_tensor_autograd(one.contiguous(), 2, self.group) for one in (key, value))
        is_before = torch.arange(LENGTH) <= torch.arange(x.shape[1])[:, None] + self.rank * x.shape[1]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=is_before)
        x = x + self.outputs(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(self.widen(x).relu())


class Embedding(nn.Module):
    """The sum of an embedding of each byte, and one of its position in the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.bytes, self.positions, self.rank = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH), group.rank()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, tokens of this rank) to (sequences, tokens of this rank, WIDTH)."""
        return self.bytes(x) + self.positions(torch.arange(x.shape[1]) + self.rank * x.shape[1])


def build() -> tuple[nn.Module, list[list[nn.Parameter]], Backward]:
    num_ranks, size = dist.get_world_size(), min(2, dist.get_world_size())
    mesh = init_device_mesh("cpu", (num_ranks // size, size), mesh_dim_names=("data", "context"))
    group = mesh["context"].get_group()
    model = nn.Sequential(Embedding(group), Block(group), Block(group), nn.Linear(WIDTH, 256))
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)
    row, column = mesh.get_coordinate()

    def backward(x: Tensor, y: Tensor) -> Tensor:
        x, y = (part.chunk(num_ranks // size)[row].chunk(size, dim=1)[column] for part in (x, y))
        loss = functional.cross_entropy(model(x).mT, y)
        loss.backward()
        return loss / num_ranks

    return model, [list(model.parameters())], backward


if __name__ == "__main__":
    train(build)
