"""Expert parallelism: each rank has some of the experts, and the ranks exchange tokens.

    torchrun --standalone --nproc-per-node 4 tutorials/parallel/experts.py

Output: the loss of each step, the same with 1, 2 and 4 ranks. To send a token to a rank with its expert costs less than
an all-gather of all experts. ``fully_shard`` shards the experts over "data", and other parameters over all ranks::

    rank 0: experts 0 and 1     rank 1: experts 2 and 3      <- "expert": exchange tokens with each other
    rank 2: experts 0 and 1     rank 3: experts 2 and 3      (ranks 0 and 2 are "data")
"""

import torch
import torch.distributed as dist
from loop import Backward, train
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from minifsdp import fully_shard

WIDTH, NUM_EXPERTS = 32, 4


class Experts(nn.Module):
    """Two linear layers for each expert. The ranks of ``mesh`` share the experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        weights = torch.randn(2, NUM_EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.up, self.down = (nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights)

    def forward(self, tokens: Tensor, expert: Tensor) -> Tensor:
        """Gets ``tokens`` of shape (n, WIDTH), sorted by ``expert`` of shape (n,). Returns the result of each token."""
        up, down = self.up.to_local(), self.down.to_local()  # of the experts of this rank
        sent = expert.bincount(minlength=NUM_EXPERTS).view(-1, len(up))  # to each rank, for each of its experts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = received.sum(1).tolist(), sent.sum(1).tolist()
        mine = all_to_all_single_autograd(tokens, *sizes, self.group)
        order = torch.arange(len(up)).repeat(len(received)).repeat_interleave(received.flatten()).argsort(stable=True)
        parts = zip(mine[order].split(received.sum(0).tolist()), up, down, strict=True)
        results = torch.cat([(part @ wide).relu() @ narrow for part, wide, narrow in parts])[order.argsort()]
        return all_to_all_single_autograd(results, *reversed(sizes), self.group)


class Mixture(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS), Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the result of one expert to each token. ``x`` has the shape (sequences, tokens, WIDTH)."""
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.flatten().argsort(stable=True)
        results = self.experts(x.flatten(0, 1)[order], expert.flatten()[order])[order.argsort()]
        return x + weight[..., None] * results.view_as(x)


def build() -> tuple[nn.Module, list[list[nn.Parameter]], Backward]:
    rank, num_ranks, size = dist.get_rank(), dist.get_world_size(), min(2, dist.get_world_size())
    mesh = init_device_mesh("cpu", (num_ranks // size, size), mesh_dim_names=("data", "expert"))
    model = nn.Sequential(nn.Embedding(256, WIDTH), Mixture(mesh["expert"]), nn.Linear(WIDTH, 256))
    experts = fully_shard(model[1].experts, mesh=mesh["data"])
    # The gradient of an expert is the sum over the tokens of all ranks of "expert", and the mean is over all ranks.
    experts.set_gradient_divide_factor(num_ranks)
    fully_shard(model)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x.chunk(num_ranks)[rank]).mT, y.chunk(num_ranks)[rank])
        loss.backward()
        return loss / num_ranks

    return model, [[*experts.parameters()], [p for n, p in model.named_parameters() if "experts" not in n]], backward


if __name__ == "__main__":
    train(build)
