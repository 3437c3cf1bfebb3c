"""Pipeline, expert and context parallelism together, with hybrid sharding.

    torchrun --standalone --nproc-per-node 8 tutorials/parallel/together.py

Output: the loss of each step. It is the same with 1, 2, 4 and 8 ranks, up to rounding. Eight ranks are a mesh with the
dimensions "stage", "copies" and "context". The ranks of the first stage::

    rank 0: rows 0 to 3, tokens 0 to 15      rank 1: rows 0 to 3, tokens 16 to 31       <- "context"
    rank 2: rows 4 to 7, tokens 0 to 15      rank 3: rows 4 to 7, tokens 16 to 31

``fully_shard`` shards the parameters of a stage over "context", and replicates them over "copies". The ranks of
"context" also share the experts: these are sharded over "copies" as well, and never all-gathered over "context".
"""

import torch
import torch.distributed as dist
from context import WIDTH, Block, Embedding
from experts import Mixture
from loop import Backward, train
from pipeline import NUM_MICRO_BATCHES, stage_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from minifsdp import fully_shard


def build() -> tuple[nn.Module, list[list[nn.Parameter]], Backward]:
    num_ranks = dist.get_world_size()
    sizes = min(2, num_ranks), max(1, num_ranks // 4), min(2, max(1, num_ranks // 2))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("stage", "copies", "context"))
    number, row, column = mesh.get_coordinate()
    context = mesh["context"]
    group = context.get_group()
    blocks = (block for _ in range(2) for block in (Block(group), Mixture(context)))
    model = stage_of([Embedding(group), *blocks, nn.Linear(WIDTH, 256)], number, sizes[0])
    for layer in model:
        if isinstance(layer, Mixture):
            fully_shard(layer.experts, mesh=mesh["copies"], reshard_after_forward=False)
            # The gradient of an expert is the sum over the tokens of all ranks of "context".
            layer.experts.set_gradient_divide_factor(sizes[1] * sizes[2])
        fully_shard(layer, mesh=mesh["copies", "context"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["copies", "context"], reshard_after_forward=False)
    stage = PipelineStage(model, number, sizes[0], torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, lambda x, y: functional.cross_entropy(x.mT, y))

    def backward(x: Tensor, y: Tensor) -> Tensor:
        x, y = (part.chunk(sizes[1])[row].chunk(sizes[2], dim=1)[column].contiguous() for part in (x, y))
        losses: list[Tensor] = []
        schedule.step(*[x] * (number == 0), target=y if number == sizes[0] - 1 else None, losses=losses)
        return sum(losses, torch.zeros(())) / NUM_MICRO_BATCHES / (sizes[1] * sizes[2])

    experts = [p for name, p in model.named_parameters() if "experts" in name]
    others = [p for name, p in model.named_parameters() if "experts" not in name]
    return model, [experts, others], backward


if __name__ == "__main__":
    train(build)
