"""Pipeline parallelism: each rank has some of the layers, and sends activations to the next one.

    torchrun --standalone --nproc-per-node 4 tutorials/parallel/pipeline.py

Output: the loss of each step. It is the same with 1, 2 and 4 ranks, up to rounding. Activations of one batch are much
smaller than layers, so a slow network can send them. Four ranks::

    rank 0: layers 0 and 1, rows 0 to 3  ->  rank 2: layers 2 and 3, rows 0 to 3         -> is "stage"
    rank 1: layers 0 and 1, rows 4 to 7  ->  rank 3: layers 2 and 3, rows 4 to 7

``fully_shard`` shards each stage over "data", for example ranks 0 and 1. A stage runs forward and backward for each
micro-batch, so its parameters stay unsharded in between, and the last backward reduces the gradients.
"""

from collections import OrderedDict

import torch
import torch.distributed as dist
from loop import Backward, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from minifsdp import fully_shard

WIDTH, NUM_MICRO_BATCHES = 32, 2


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, tokens, WIDTH) to the same shape."""
        return x + self.narrow(self.widen(x).relu())


def stage_of(layers: list[nn.Module], number: int, num_stages: int) -> nn.Sequential:
    """The layers of one stage. Their names are their positions in the whole model, so checkpoints fit together."""
    names = [position for position in range(len(layers)) if position * num_stages // len(layers) == number]
    return nn.Sequential(OrderedDict((str(position), layers[position]) for position in names))


def build() -> tuple[nn.Module, list[list[nn.Parameter]], Backward]:
    num_ranks = dist.get_world_size()
    size = min(2, num_ranks)
    mesh = init_device_mesh("cpu", (size, num_ranks // size), mesh_dim_names=("stage", "data"))
    number, row = mesh.get_coordinate()
    model = stage_of([nn.Embedding(256, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 256)], number, size)
    for layer in model:
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    stage = PipelineStage(model, number, size, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, lambda x, y: functional.cross_entropy(x.mT, y))

    def backward(x: Tensor, y: Tensor) -> Tensor:
        x, y = (part.chunk(num_ranks // size)[row] for part in (x, y))
        losses: list[Tensor] = []
        schedule.step(*[x] * (number == 0), target=y if number == size - 1 else None, losses=losses)
        return sum(losses, torch.zeros(())) / NUM_MICRO_BATCHES / (num_ranks // size)

    return model, [list(model.parameters())], backward


if __name__ == "__main__":
    train(build)
