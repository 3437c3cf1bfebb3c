"""Loads the checkpoint of an unsharded model into a sharded model.

What will happen? The checkpoint and the model have the same names and shapes.

    torchrun --nproc-per-node 2 tutorials/failure_lab/plain_checkpoint.py
"""

import torch
from lab import layers, on_two_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from minifsdp import fully_shard

# ---- the part to look at and to fix ----


def broken(model, checkpoint):
    model.load_state_dict(checkpoint)


# ---- the experiment ----


def experiment(load, rank):
    checkpoint = {name: value + 1 for name, value in layers().state_dict().items()}
    model = fully_shard(layers())
    load(model, dict(checkpoint))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), checkpoint[name])


# ---- one way to fix it; try your own first ----


def fixed(model, checkpoint):
    set_model_state_dict(model, checkpoint, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
