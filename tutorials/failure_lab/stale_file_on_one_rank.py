"""Each rank reads its own copy of a checkpoint. The copy of rank 1 is older, and a layer in it has a different name.

What will happen on rank 1? What will happen on rank 0, whose file is correct?

    torchrun --nproc-per-node 2 tutorials/failure_lab/stale_file_on_one_rank.py
"""

from lab import layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(checkpoint):
    return checkpoint


# ---- the experiment ----


def experiment(renamed, rank):
    checkpoint = layers().state_dict()
    if rank == 1:
        checkpoint["head.weight"] = checkpoint.pop("1.weight")
    model = FSDP(layers())
    model.load_state_dict(renamed(checkpoint))


# ---- one way to fix it; try your own first ----


def fixed(checkpoint):
    return {name.replace("head.", "1."): value for name, value in checkpoint.items()}


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
