"""A hook in the middle of the model raises an error if a gradient is not finite. The third batch of rank 1 is bad.

What will happen on rank 1? What will happen on rank 0, whose batch is good?

    torchrun --nproc-per-node 2 tutorials/failure_lab/raises_in_backward.py
"""

import torch
import torch.distributed as dist
from lab import batch, layers, on_two_ranks

from minifsdp import fully_shard


def guard(gradient):
    if not gradient.isfinite().all():
        raise ValueError("a gradient is not a number")


# ---- the part to look at and to fix ----


def broken(loss):
    return False


# ---- the experiment ----


def experiment(shall_be_skipped, rank):
    model = layers(3)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[1].register_forward_hook(lambda module, args, output: output.register_hook(guard) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        x = batch(number) * (float("nan") if (rank, number) == (1, 2) else 1)
        loss = model(x).square().mean()
        if not shall_be_skipped(loss):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


# ---- one way to fix it; try your own first ----


def fixed(loss):
    is_bad = (~loss.detach().isfinite()).float()
    dist.all_reduce(is_bad, dist.ReduceOp.MAX)  # Either all ranks skip the batch, or none.
    return bool(is_bad)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
