"""fully_shard from end to end: sharding in place, explicit prefetch, mixed precision, distributed checkpoints.

    torchrun --standalone --nproc-per-node 2 tutorials/fully_shard.py
    torchrun --standalone --nproc-per-node 2 tutorials/fully_shard.py --explicit-prefetch --mixed-precision --dcp folder

Output: who holds which rows, losses beside those of a single process, and what is gathered ahead.

It takes a few seconds on two CPU cores; the switches may be combined. With ``--dcp`` the first start saves into the
folder and the second one goes on from there, also with another number of ranks. ``--library torch`` runs the same
script on torch's own ``fully_shard``, whose names, arguments and losses are the same.

What is learned, with the numbers of the comments below:

1. **Nothing is wrapped.** ``fully_shard`` changes a module in place: its class gains methods, its parameters become
   ``DTensor``s, each of which knows the whole shape and holds this rank's rows. The blocks first, the model last: a
   unit is what is left when the call is made.
2. **Values come last.** On the meta device a model has shapes and no memory. It is sharded like that, then each rank
   makes room for its own rows only, and rank 0 sends the values. A model that fits on no rank is never whole on any.
   Without such a message nobody compares: models that were built from different seeds stay different in their shards.
3. **The optimizer comes after the sharding,** and since it owns DTensors, everything that torch does with tensors works
   as it is: ``clip_grad_norm_``, the stock ``GradScaler``, state dicts. It is the other great difference to
   ``FullyShardedDataParallel``, which needs a method of its own for each of these.
4. **Explicit prefetch.** Backward gathers one unit ahead by itself. With lists one may say more: two ahead, in both
   directions, and the first gather before the forward begins, while the batch is still being read. More is paid for,
   unit by unit, with memory.
5. **Mixed precision.** Rows are kept in float32, gathered and computed with in bfloat16, and gradients are added up in
   float32. ``reduce_dtype`` should always be said: what follows if it is not, differs between releases of torch.
6. **Accumulation** is a switch here and no context: ``set_requires_gradient_sync(False)``.
7. **Distributed checkpoints.** A state dict of DTensors costs no communication. Each rank writes its rows, and on
   reading takes those that it needs.

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
    """1. and 2. The sharded model, with the values of rank 0's plain one. Every rank must call it."""
    arguments: dict[str, Any] = {}
    if options.mixed_precision:
        # 5.
        arguments["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Net(WIDTH, NUM_BLOCKS)
    for block in model.blocks:
        library.fully_shard(block, **arguments)
    library.fully_shard(model, **arguments)
    assert all(parameter.is_meta for parameter in model.parameters()), "still without memory"
    model.to_empty(device=place.device)
    values = plain(place).state_dict() if place.rank == 0 else {}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    if options.explicit_prefetch:
        prefetch_two_ahead(model)
    return model


def prefetch_two_ahead(model: nn.Module) -> None:
    """4. Each block is told which blocks to gather together with itself."""
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])


def batch(step: int, place: Place) -> Tensor:
    """Of all ranks together."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(place.device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, place: Place, options: argparse.Namespace
) -> list[float]:
    losses = []
    for step in steps:
        if options.explicit_prefetch:
            model.unshard()  # 4. The root's own gather, before anybody waits for it.
        loss = loss_of(model, batch(step, place).chunk(place.num_ranks)[place.rank])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 3. torch's own.
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def train_plain(place: Place) -> list[float]:
    """What a single process makes of the whole batches."""
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
    """Every rank must call it."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Every rank must call it; returns the number of steps that were made."""
    weights, state = get_state_dict(model, optimizer)  # The tensors to be read into.
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return saved["step"]


def is_saved(folder: Path) -> bool:
    """Whether all ranks see a complete checkpoint; the list of what is in it is written last."""
    return all(from_all_ranks((folder / ".metadata").exists()))


# ---- what is to be seen ----


def show(model: nn.Module, place: Place) -> None:
    """1. What a parameter is now."""
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
    """5. Kept in one dtype, computed with in another."""
    model.blocks[0].unshard()
    gathered = {parameter.dtype for parameter in model.blocks[0].parameters()}
    model.blocks[0].reshard()
    say(place, f"kept in {model.blocks[0].widen.weight.dtype}, gathered as {', '.join(map(str, gathered))}")
    assert gathered == {torch.bfloat16 if options.mixed_precision else torch.float32}


def show_order(model: nn.Module, place: Place, options: argparse.Namespace) -> None:
    """4. In which order forward asks for the blocks."""
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
    """6. Two batches, one reduction; the gradient is that of both."""
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
        say(place, f"goes on from step {first}, saved in {options.dcp}")
    elif options.dcp is not None:
        last = NUM_STEPS // 2
    losses = train(model, optimizer, range(first, last), place, options)
    if last < NUM_STEPS:
        save(model, optimizer, last, options.dcp)
        say(place, f"saved after step {last}; start it once more, with as many ranks as you like")
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
    parser.add_argument("--explicit-prefetch", action="store_true", help="gather two blocks ahead")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16")
    parser.add_argument("--dcp", type=Path, metavar="FOLDER", help="save half-way into it, or go on from it")
    parser.add_argument("--library", choices=["minifsdp", "torch"], default="minifsdp", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))
