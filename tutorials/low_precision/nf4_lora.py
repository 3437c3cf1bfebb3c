"""QLoRA with ``fully_shard``: frozen weights in 4 bits, and small trained matrices beside them.

    torchrun --standalone --nproc-per-node 2 tutorials/low_precision/nf4_lora.py

The model is first trained plainly on one text. Then its layers are frozen, and each gets an *adapter*: two matrices
whose product is added to the weight. Only the adapters are trained on another text. In the second training, the frozen
weights are of torchao's class `NF4Tensor`. Its elements have 4 bits, also in shards and in all-gathers.
"""

from collections.abc import Callable

import torch
from loop import OTHER_TEXT, compare, new_model, shard, train
from torch import Tensor, nn
from torchao.quantization import to_nf4


class LayerWithAdapter(nn.Module):
    """``layer(x) + up(down(x))``, which equals ``layer(x)`` before the training."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 8, bias=False)
        self.up = nn.Linear(8, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def plain(layer: nn.Linear) -> nn.Linear:
    return layer


def four_bits(layer: nn.Linear) -> nn.Linear:
    """Replaces the weight by one with 4 bits for each element."""
    # One scale for each 32 elements, and one scale for each 32 of these scales.
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), block_size=32, scaler_block_size=32), requires_grad=False)
    return layer


def with_adapters(change: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    """Trains the model plainly and freezes it. Then changes the layers of its blocks, and adds the adapters."""
    trained = shard(new_model())
    train(trained)
    model = new_model()
    model.load_state_dict({name: value.full_tensor() for name, value in trained.state_dict().items()})
    model.requires_grad_(False)
    torch.manual_seed(1)
    for block in model[1:3]:
        for name in ("heads", "mix", "wide", "narrow"):
            layer = block.get_submodule(name)
            setattr(block, name, LayerWithAdapter(change(layer)))
    return model


if __name__ == "__main__":
    compare(
        lambda: train(shard(with_adapters(plain)), text=OTHER_TEXT),
        lambda: train(shard(with_adapters(four_bits)), text=OTHER_TEXT),
    )
