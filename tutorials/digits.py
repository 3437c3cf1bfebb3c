"""Mixed precision and batch norm: a network that reads handwritten digits.

    python -m pip install scikit-learn
    torchrun --standalone --nproc-per-node 2 tutorials/digits.py

Output: the dtype of each layer, batch statistics that differ between ranks, and the accuracy on the test images.

It takes about a quarter of a minute on two CPU cores. The data, 1797 images of 8 x 8 pixels, come with scikit-learn.

What you learn:

1. **Three dtypes, three places.** All-gathers and computation use
   ``param_dtype``, and gradients are reduced in ``reduce_dtype``. The local shards that the optimizer updates always
   stay in float32, because a step of Adam changes a weight by perhaps a thousandth, and bfloat16 has only 8 bits of
   precision. In bfloat16, ``1 + 1/1000`` is 1. So a model whose weights are *stored* in bfloat16 stops learning. A
   model that only *computes* in bfloat16 does not.
2. **Batch norm stays in full precision.** It divides by a standard deviation that is averaged over many batches, and 8
   bits are too few for such averages. So with an auto-wrap policy, every batch norm becomes a small unit of its own in
   full precision, and a warning reports this. Each of these units needs a small all-gather, which is negligible for
   three of them. The layers around it need no change, because the unit casts its input to float32 and its output back
   to bfloat16.
3. **The averages of batch norm are not parameters.** They are buffers, and FSDP neither shards nor synchronizes
   buffers. Each rank averages over its own images, so the averages differ slightly between ranks, and a checkpoint
   would contain those of rank 0. DDP hides this difference: it broadcasts the buffers of rank 0 before every forward.
   One all-reduce before evaluation is better, because the mean over all ranks covers all images.
4. **All ranks evaluate.** Each forward all-gathers, so all ranks must take part. Each rank tests its own part of the
   images. At the end, the ranks sum two numbers: the correct predictions and the images. A mean of accuracies would be
   wrong if the parts have different sizes.

Spec: MP-02, MP-03, MP-04, MP-19, TRAIN-04, TRAIN-15, TRAIN-16.
"""

from __future__ import annotations

import argparse
import functools
import warnings

import torch
import torch.distributed as dist
from common import Place, from_all_ranks, on_ranks, say
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision
from minifsdp.wrap import ModuleWrapPolicy


class Stage(nn.Module):
    """Convolution, batch norm and ReLU, then max pooling, which halves height and width."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (images, num_in, height, width) to (images, num_out, height / 2, width / 2)."""
        return self.pool(torch.relu(self.norm(self.convolution(x))))


def build(place: Place) -> nn.Module:
    torch.manual_seed(0)
    stages = nn.Sequential(Stage(1, 32), Stage(32, 48), Stage(48, 64), nn.Flatten(), nn.Linear(64, 10))
    return stages.to(place.device)


def shard(model: nn.Module, place: Place) -> tuple[FSDP, list[str]]:
    """The sharded model, and the warnings of the wrapper."""
    # 1. Compute in bfloat16. Reduce gradients in float32, because a reduction adds the gradients of all ranks.
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Stage}), mixed_precision=policy, device_id=place.device)
    return model, [str(warning.message) for warning in said]


def parts(place: Place) -> tuple[DataLoader, DataLoader, DistributedSampler]:
    """This rank's training images and test images, and the sampler that distributes the training images."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    everything = TensorDataset(images, torch.from_numpy(digits.target))
    test = torch.utils.data.Subset(everything, range(0, len(everything), 5))
    train = torch.utils.data.Subset(everything, [i for i in range(len(everything)) if i % 5])
    # The sampler shuffles and splits the data between the ranks, so the loader must not shuffle again.
    sampler = DistributedSampler(train, place.num_ranks, place.rank, shuffle=True)
    mine = torch.utils.data.Subset(test, range(place.rank, len(test), place.num_ranks))
    return DataLoader(train, batch_size=32, sampler=sampler), DataLoader(mine, batch_size=64), sampler


def dtypes_in_forward(model: nn.Module) -> dict[str, torch.dtype]:
    """A dictionary that the next forward fills: the dtype of the weight of each kind of layer."""
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, _: object) -> None:
        seen[type(module).__name__] = module.weight.dtype

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            module.register_forward_pre_hook(look)
    return seen


def average_buffers(model: nn.Module) -> None:
    """3. Every rank must call it. The batch counter is also a buffer, but an integer and equal on all ranks."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, place: Place) -> tuple[float, int]:
    """4. The accuracy on all test images, and their number. Every rank must call it."""
    model.eval()
    counts = torch.zeros(2, device=place.device)
    # All ranks must run the same number of forwards. The last batch of a rank can be smaller.
    for images, labels in loader:
        guesses = model(images.to(place.device)).argmax(dim=1)
        counts += torch.tensor([(guesses == labels.to(place.device)).sum(), len(labels)], device=place.device)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item(), int(counts[1])


def lesson(options: argparse.Namespace, place: Place) -> None:
    model, said = shard(build(place), place)
    for warning in said:
        say(place, f"warning: {warning}")
    seen = dtypes_in_forward(model)
    train, test, sampler = parts(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # Without it every epoch has the same batches.
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images.to(place.device)).float(), labels.to(place.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        say(place, f"epoch {epoch + 1} of {options.epochs}: loss of rank 0's last batch {loss.item():.3f}")

    means = from_all_ranks([buffer.flatten()[0].item() for name, buffer in model.named_buffers() if "mean" in name])
    average_buffers(model)
    together = from_all_ranks([buffer.flatten()[0].item() for name, buffer in model.named_buffers() if "mean" in name])
    right, num_images = accuracy(model, test, place)
    saved = model.state_dict()  # Every rank takes part, and every rank gets the full state dict.
    kept = {parameter.dtype for parameter in model.parameters()}

    say(place, f"in forward: {', '.join(f'{kind} {dtype}' for kind, dtype in sorted(seen.items()))}; kept in {kept}")
    for rank, values in enumerate(means):
        say(place, f"first running mean of each norm, rank {rank}: " + " ".join(f"{value:.5f}" for value in values))
    say(place, f"after averaging:                         {' '.join(f'{value:.5f}' for value in together[0])}")
    say(place, f"{100 * right:.1f} % of {num_images} test images are classified correctly")

    assert seen == {"Conv2d": torch.bfloat16, "BatchNorm2d": torch.float32, "Linear": torch.bfloat16}
    assert kept == {torch.float32}
    assert all(tensor.dtype == torch.float32 for tensor in saved.values() if tensor.is_floating_point())
    assert sum("BatchNorm" in warning for warning in said) == 1
    # Three norms, three stages around them, and the root.
    assert len(FSDP.fsdp_modules(model)) == 7
    assert means[0] != means[1]
    assert together[0] == together[1]
    assert num_images == 360
    assert right > (0.97 if options.epochs >= 4 else 0.7)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mixed precision and batch norm, on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))
