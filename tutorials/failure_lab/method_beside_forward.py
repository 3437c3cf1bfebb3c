"""A sharded model with two methods: forward, and ``encode``, which stops before the last layer.

What will happen when ``encode`` is called? Are the weights all-gathered for it?

    torchrun --nproc-per-node 2 tutorials/failure_lab/method_beside_forward.py
"""

from lab import batch, layers, on_two_ranks
from torch import nn

from minifsdp import fully_shard, register_fsdp_forward_method


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = layers(2)

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        return self.last(self.encode(x))


# ---- the part to look at and to fix ----


def broken():
    return fully_shard(Coder())


# ---- the experiment ----


def experiment(build, rank):
    model = build()
    for _ in range(2):
        model(batch(rank)).square().mean().backward()
    code = model.encode(batch(rank))
    assert code.shape == (4, 8)


# ---- one way to fix it; try your own first ----


def fixed():
    model = fully_shard(Coder())
    register_fsdp_forward_method(model, "encode")  # all-gather before it and reshard after it, as for forward
    return model


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
