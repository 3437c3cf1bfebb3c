"""Clips the gradients of a wrapped model to a norm of 0.1 with torch's own function.

What will happen? Which norm does each rank compute?

    torchrun --nproc-per-node 2 tutorials/failure_lab/clip_on_each_rank.py
"""

from lab import WrongAnswerError, batch, layers, on_two_ranks
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


# ---- the experiment ----


def experiment(clip, rank):
    model = FSDP(layers())
    model(batch(rank)).square().sum().backward()
    norm = clip(model).item()
    expected = norm_in_one_process()
    print(f"rank {rank}: the norm is {norm:.4f}, a single process gets {expected:.4f}", flush=True)
    if abs(norm - expected) > 1e-3:
        raise WrongAnswerError(f"this rank's gradients were scaled by {0.1 / norm:.4f} instead of {0.1 / expected:.4f}")


def norm_in_one_process():
    model = layers()
    (sum(model(batch(rank)).square().sum() for rank in range(2)) / 2).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


# ---- one way to fix it; try your own first ----


def fixed(model):
    return model.clip_grad_norm_(0.1)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
