"""Trains on sentences. Rank 0 has 2 tokens, and rank 1 has 6. The loss of a rank is the mean over its tokens.

What will happen? Is the gradient equal to that of a single process with all 8 tokens?

    torchrun --nproc-per-node 2 tutorials/failure_lab/mean_over_tokens.py
"""

import torch
import torch.distributed as dist
from lab import WrongAnswerError, batch, layers, on_two_ranks

from minifsdp import fully_shard

TOKENS = (2, 6)

# ---- the part to look at and to fix ----


def broken(loss_of_tokens):
    return loss_of_tokens.mean()


# ---- the experiment ----


def experiment(loss, rank):
    model, plain = fully_shard(layers(1)), layers(1)
    loss(model(batch(rank, rows=TOKENS[rank])).square().sum(dim=1)).backward()
    everything = torch.cat([batch(number, rows=TOKENS[number]) for number in range(2)])
    plain(everything).square().sum(dim=1).mean().backward()

    gradient, expected = model[0].weight.grad.full_tensor(), plain[0].weight.grad
    error = ((gradient - expected).abs().max() / expected.abs().max()).item()
    print(f"rank {rank}: the gradient is off by {error:.1%} of its largest element", flush=True)
    if error > 1e-4:
        raise WrongAnswerError("the gradient is not that of a single process")


# ---- one way to fix it; try your own first ----


def fixed(loss_of_tokens):
    num_tokens = torch.tensor(float(len(loss_of_tokens)))
    dist.all_reduce(num_tokens)
    # The reduction averages over 2 ranks, so it divides by 2. The factor 2 compensates for this.
    return loss_of_tokens.sum() * 2 / num_tokens


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
