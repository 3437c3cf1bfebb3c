"""An optimizer with 8-bit states: the two averages of Adam need a quarter of the memory.

    torchrun --standalone --nproc-per-node 2 tutorials/low_precision/adam_8bit.py

torchao stores an average as 8-bit numbers, with one scale for each block of 256 elements. The states belong to the
sharded parameters, so a rank has only the states of its shards. A shard with fewer than 4,096 elements keeps states in
float32.
"""

from loop import compare, new_model, shard, train
from torchao.optim import AdamW8bit


def with_8_bits() -> list[float]:
    return train(shard(new_model()), lambda weights: AdamW8bit(weights, lr=3e-3))


if __name__ == "__main__":
    compare(lambda: train(shard(new_model())), with_8_bits)
