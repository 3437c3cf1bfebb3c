"""Trains with a scaled loss, as float16 requires. At the first scale one element of the gradient overflows.

What will happen? Each rank checks for infinite values, and skips the step if it finds one.

    torchrun --nproc-per-node 2 tutorials/failure_lab/scaler_on_each_rank.py
"""

import torch
from lab import WrongAnswerError, batch, from_all_ranks, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardedGradScaler

# ---- the part to look at and to fix ----


def broken():
    return torch.amp.GradScaler("cpu")


# ---- the experiment ----


def experiment(make_scaler, rank):
    model, scaler = FSDP(layers(1)), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.ones(8)
    weights[7] = 1e36  # The weight of one output is so large that 65536 times its gradient overflows.
    scaler.scale((model(batch(rank)) * weights).mean()).backward()
    scaler.step(optimizer)
    scaler.update()

    scales = from_all_ranks(scaler.get_scale())
    print(f"rank {rank}: the scale is {scales[rank]:.0f}", flush=True)
    if len(set(scales)) > 1:
        raise WrongAnswerError(f"one rank has made a step and the other has not; their scales are now {scales}")


# ---- one way to fix it; try your own first ----


def fixed():
    return ShardedGradScaler("cpu")


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
