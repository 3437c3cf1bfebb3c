"""Training in float8: matrices are multiplied, and weights are sent, as 8-bit floats.

    torchrun --standalone --nproc-per-node 2 tutorials/low_precision/float8.py

The weights, their gradients and the optimizer stay in float32. Each rank casts its shard to float8 before the
all-gather, which then sends a quarter of the bytes. The shards of a weight have the same scale on all ranks. After each
step, one all-reduce computes the scales of all weights.

torchao computes the products of a CPU in float32 (``emulate=True``), from operands that are rounded to float8. With
torch's ``fully_shard``, this all-gather raises an error on CPUs, because gloo does not send 8-bit floats.
"""

from loop import compare, new_model, shard, train
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp


def in_float8() -> list[float]:
    model = new_model()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    for block in model[1:3]:
        convert_to_float8_training(block, config=config)
    return train(shard(model), after_step=precompute_float8_dynamic_scale_for_fsdp)


if __name__ == "__main__":
    compare(lambda: train(shard(new_model())), in_float8)
