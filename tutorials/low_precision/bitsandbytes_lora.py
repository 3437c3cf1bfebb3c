"""QLoRA with the wrapper and bitsandbytes, as accelerate and PEFT do it.

    torchrun --standalone --nproc-per-node 2 tutorials/low_precision/bitsandbytes_lora.py

bitsandbytes packs two weights of 4 bits into a byte. A flat parameter has one dtype, so ``quant_storage`` makes the
packed weight a float32 tensor with the same bytes. A flat parameter is either frozen or trained, so the policy makes
each matrix of an adapter a unit of its own.
"""

import bitsandbytes
import torch
from loop import OTHER_TEXT, Block, compare, train
from nf4_lora import plain, with_adapters
from torch import nn

from minifsdp import FullyShardedDataParallel
from minifsdp.wrap import CustomPolicy


def four_bits(layer: nn.Linear) -> nn.Module:
    new = bitsandbytes.nn.LinearNF4(layer.in_features, layer.out_features, quant_storage=torch.float32)
    new.load_state_dict(layer.state_dict())
    new.requires_grad_(False)
    return new.to("cpu")  # This call packs the weight.


def wrap(model: nn.Module) -> nn.Module:
    def becomes_a_unit(module: nn.Module) -> bool:
        is_adapter = isinstance(module, nn.Linear) and module.weight.requires_grad
        return is_adapter or isinstance(module, Block)

    return FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(becomes_a_unit), device_id=torch.device("cpu"))


if __name__ == "__main__":
    compare(
        lambda: train(wrap(with_adapters(plain)), text=OTHER_TEXT),
        lambda: train(wrap(with_adapters(four_bits)), text=OTHER_TEXT),
    )
