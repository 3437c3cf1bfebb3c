"""fully_shard from end to end: sharding in place, explicit prefetch, mixed precision, distributed checkpoints.

    torchrun --standalone --nproc-per-node 2 tutorials/fully_shard.py
    torchrun --standalone --nproc-per-node 2 tutorials/fully_shard.py --explicit-prefetch --mixed-precision --dcp folder

Output: the rows that each rank stores, losses next to those of a single process, and the prefetched units.

It takes a few seconds on two CPU cores; the options can be combined. With ``--dcp``, the first run saves a checkpoint
to the folder, and the second run resumes from it, also with a different number of ranks.
``--library torch`` runs the script with torch's own ``fully_shard``. Names, arguments and losses are the same.

What you learn, with the numbers of the comments below:

1. **Nothing is wrapped.** ``fully_shard`` changes a module in place: it adds methods to the class of the module, and
   replaces its parameters by ``DTensor``s. A DTensor has the unsharded shape and stores the rows of this rank. Shard
   the blocks first and the model last, because a unit consists of the parameters that do not belong to another unit
   yet.
2. **Set the values last.** On the meta device, a model has shapes and no memory. The script shards the model on the
   meta device. Then each rank allocates only its own rows, and rank 0 broadcasts the values. No rank needs memory for
   the whole model. ``fully_shard`` itself does not broadcast or compare values, so models that were built with
   different seeds stay different.
3. **Create the optimizer after sharding.** It updates DTensors, so torch's own tools work unchanged:
   ``clip_grad_norm_``, ``GradScaler``, and state dicts. ``FullyShardedDataParallel`` needs its own method for each of
   these.
4. **Explicit prefetch.** By default, backward prefetches one unit. You can pass lists of modules to prefetch more
   units, for example two units in forward and in backward. ``unshard()`` issues the first all-gather before the
   forward, while the batch is being read. Each additional prefetched unit needs memory.
5. **Mixed precision.** Rows are stored in float32. All-gathers and computation use bfloat16, and gradients are reduced
   in float32. Always set ``reduce_dtype``, because its default differs between versions of torch.
6. **Accumulation.** ``set_requires_gradient_sync(False)`` replaces the context manager ``no_sync()``.
7. **Distributed checkpoints.** A state dict of DTensors needs no communication. Each rank writes its rows, and reads
   the rows that it needs.

Spec: TRAIN-23, FS2-01 to FS2-05, FS2-PREF, FS2-MP, FS2-SD, MIG-12, MIG-18, MIG-19.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Net, Place, from_all_ranks, mean_over_ranks, on_ranks, say
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

WIDTH, NUM_BLOCKS, BATCH, NUM_STEPS = 32, 4, 24, 6


def plain(place: Place, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(WIDTH, NUM_BLOCKS).to(place.device)


def shard(options: argparse.Namespace, library: ModuleType, place: Place) -> nn.Module:
    """1. and 2. The sharded model, with the values of rank 0's plain model. Every rank must call it."""
    arguments: dict[str, Any] = {}
    if options.mixed_precision:
        # 5.
        arguments["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Net(WIDTH, NUM_BLOCKS)
    for block in model.blocks:
        library.fully_shard(block, **arguments)
    library.fully_shard(model, **arguments)
    assert all(parameter.is_meta for parameter in model.parameters()), "the memory is not allocated yet"
    model.to_empty(device=place.device)
    values = plain(place).state_dict() if place.rank == 0 else {}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    if options.explicit_prefetch:
        prefetch_two_ahead(model)
    return model


def prefetch_two_ahead(model: nn.Module) -> None:
    """4. Each block prefetches the next two blocks."""
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])


def batch(step: int, place: Place) -> Tensor:
    """The global batch of all ranks."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(place.device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, place: Place, options: argparse.Namespace
) -> list[float]:
    losses = []
    for step in steps:
        if options.explicit_prefetch:
            model.unshard()  # 4. The root's all-gather, issued before it is needed.
        loss = loss_of(model, batch(step, place).chunk(place.num_ranks)[place.rank])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 3. torch's own.
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def train_plain(place: Place) -> list[float]:
    """The losses of a single process on the whole batches."""
    model, losses = plain(place), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        loss = loss_of(model, batch(step, place))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- 7 ----


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Saves a checkpoint. Every rank must call it."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Loads a checkpoint; returns the number of steps that it has trained. Every rank must call it."""
    weights, state = get_state_dict(model, optimizer)  # `dcp.load` reads into these tensors.
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return saved["step"]


def is_saved(folder: Path) -> bool:
    """Whether all ranks see a complete checkpoint; its metadata file is written last."""
    return all(from_all_ranks((folder / ".metadata").exists()))


# ---- printing ----


def show(model: nn.Module, place: Place) -> None:
    """1. Prints the parameters after the sharding."""
    weight = model.blocks[0].widen.weight
    say(place, f"{type(model).__name__}, a {type(model).__mro__[1].__name__} and a {Net.__name__}")
    for rank, rows in enumerate(from_all_ranks(tuple(weight.to_local().shape))):
        say(place, f"blocks.0.widen.weight: {tuple(weight.shape)} {weight.placements[0]}, rank {rank} has {rows}")
    assert isinstance(model, Net)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.dtype == torch.float32


def show_dtypes(model: nn.Module, place: Place, options: argparse.Namespace) -> None:
    """5. Prints the dtype of storage and the dtype of computation."""
    model.blocks[0].unshard()
    gathered = {parameter.dtype for parameter in model.blocks[0].parameters()}
    model.blocks[0].reshard()
    say(place, f"kept in {model.blocks[0].widen.weight.dtype}, gathered as {', '.join(map(str, gathered))}")
    assert gathered == {torch.bfloat16 if options.mixed_precision else torch.float32}


def show_order(model: nn.Module, place: Place, options: argparse.Namespace) -> None:
    """4. Prints the order in which forward all-gathers the blocks."""
    from minifsdp import trace

    with trace.record() as recorder:
        loss_of(model, batch(0, place).chunk(place.num_ranks)[place.rank]).backward()
    model.zero_grad()
    order = [word.replace(" blocks.", "") for word in recorder.order("AG", "F") if "blocks." in word][:7]
    say(place, f"forward: {' '.join(order)} ...")
    if options.explicit_prefetch:
        assert order == ["AG0", "AG1", "AG2", "F0", "AG3", "F1", "F2"]
    else:
        assert order == ["AG0", "F0", "AG1", "F1", "AG2", "F2", "AG3"]


def lesson_accumulation(model: nn.Module, place: Place) -> None:
    """6. Two batches with one reduction give the same gradient as with two reductions."""
    gradients = []
    for sync_at_first in (True, False):
        model.zero_grad()
        for number in range(2):
            model.set_requires_gradient_sync(sync_at_first or number == 1)
            loss_of(model, batch(number, place).chunk(place.num_ranks)[place.rank]).backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    model.zero_grad()
    say(place, "accumulated over two batches: the same gradient with one reduction as with two")
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def lesson(options: argparse.Namespace, place: Place) -> None:
    if options.library == "torch":
        import torch.distributed.fsdp as library
    else:
        import minifsdp as library
    model = shard(options, library, place)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    show(model, place)
    show_dtypes(model, place, options)

    first, last = 0, NUM_STEPS
    if options.dcp is not None and is_saved(options.dcp):
        first = load(model, optimizer, options.dcp)
        say(place, f"resumes from step {first}, saved in {options.dcp}")
    elif options.dcp is not None:
        last = NUM_STEPS // 2
    losses = train(model, optimizer, range(first, last), place, options)
    if last < NUM_STEPS:
        save(model, optimizer, last, options.dcp)
        say(place, f"saved after step {last}; run the command again, with any number of ranks")
    say(place, f"losses {' '.join(f'{loss:.6f}' for loss in losses)}")
    expected = train_plain(place)[first:last]
    say(place, f"plain  {' '.join(f'{loss:.6f}' for loss in expected)}")
    tolerance = 2e-2 if options.mixed_precision else 1e-5
    assert all(abs(one - other) < tolerance * other for one, other in zip(losses, expected, strict=True))
    if options.library == "minifsdp":
        show_order(model, place, options)
    lesson_accumulation(model, place)
    dist.barrier()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with fully_shard, in several variants.")
    parser.add_argument("--explicit-prefetch", action="store_true", help="prefetch two blocks")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16")
    parser.add_argument("--dcp", type=Path, metavar="FOLDER", help="save to it half-way, or resume from it")
    parser.add_argument("--library", choices=["minifsdp", "torch"], default="minifsdp", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))
