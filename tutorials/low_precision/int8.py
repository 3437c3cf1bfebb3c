"""Training in int8: matrices are multiplied as 8-bit integers, in forward and in backward.

    torchrun --standalone --nproc-per-node 2 tutorials/low_precision/int8.py

torchao rounds each row of an operand to 8-bit integers with a scale of its own. The weights stay in float32, so FSDP
shards, all-gathers and reduces them as in the plain training.
"""

from loop import compare, new_model, shard, train
from torchao.prototype.quantized_training import int8_mixed_precision_training
from torchao.quantization import quantize_


def in_int8() -> list[float]:
    model = new_model()
    for block in model[1:3]:
        quantize_(block, int8_mixed_precision_training(module_swap=True))
    return train(shard(model))


if __name__ == "__main__":
    compare(lambda: train(shard(new_model())), in_int8)
