"""Seven knobs of a training loop: the cost of each, and a check that none of them changes the result.

    torchrun --standalone --nproc-per-node 2 tutorials/knobs.py

Output: the savings and costs of each option in numbers, and the losses, which equal those of a single process.

It takes about a quarter of a minute on two CPU cores. A *knob* is an option of a training loop. The model has three
blocks, each of them a unit. The script trains it for a few steps with each option, and compares the result with a
single process that trains on the whole batches.

1. **Accumulation.** Several small batches are used for one optimizer step. Inside ``no_sync()``, a backward does not
   reduce gradients. The first backward outside of it reduces the sum. This saves reduce-scatters and needs more memory,
   because every rank keeps *unsharded* gradients until the reduction. ``no_sync`` is optional: without it, the sharded
   gradients are accumulated, with the same result. Two rules are important. Divide each loss by the number of batches
   in its window. Take an optimizer step for the last window even if it is not full; otherwise its gradients are added
   to the first window of the next epoch, or lost.
2. **Clipping.** The norm of a model is the root of the sum of *all* squares, and each rank has some of them. The method
   ``model.clip_grad_norm_`` adds them up over the ranks. torch's function of the same name does not. It gets local
   shards and computes a different norm on each rank, so each rank scales its shards by a different factor.
3. **float16 and its scaler.** Gradients below 6e-8 are zero in float16. So a scaler multiplies the loss by a large
   scale, and divides the gradients by it afterwards. If a gradient becomes infinite, the scaler skips the step and
   halves the scale. If a gradient is infinite on one rank, all ranks must skip the step;
   ``ShardedGradScaler`` does this. Call ``unscale_``, then clip, then ``step``, then ``update``. If you clip earlier,
   the norm is that of scaled gradients.
4. **Activation checkpointing.** Only the inputs of a block are kept, and its activations are recomputed in backward.
   This needs one more forward and saves most of the memory for activations. Apply it *after* FSDP, so that the
   recomputation runs inside the unit. Backward all-gathers the parameters anyway, so the number of all-gathers does not
   change. All names stay the same.
5. **Compilation.** Call ``torch.compile`` after wrapping, and use ``use_orig_params=True``, because the compiler looks
   up parameters by name.
6. **Data loaders.** Worker processes, pinned memory, and ``zero_grad(set_to_none=True)`` change the speed and the
   memory, but not the result.
7. **Evaluation on one rank** is a mistake, and the script shows its error. A forward issues all-gathers, so this rank
   waits for the other ranks. In this script it waits for four seconds; with a default process group it waits for half
   an hour.

The script does not use a learning rate multiplied by the number of ranks. That is an option for large batches. FSDP
averages gradients as DDP does, so use the same learning rate as with DDP.

Spec: TRAIN-05, TRAIN-06, TRAIN-22, TRAIN-24, TRAIN-25, TRAIN-26, TRAIN-30, TRAIN-31, NOSYNC-03, NOSYNC-05, CLIP-06,
MP-29.
"""

from __future__ import annotations

import argparse
import functools
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from common import Block, Place, from_all_ranks, mean_over_ranks, on_ranks, say
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ShardedGradScaler, trace
from minifsdp.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from minifsdp.wrap import ModuleWrapPolicy

NUM_BLOCKS, WIDTH, BATCH, NUM_BATCHES, WINDOW = 3, 24, 24, 7, 3


def build(place: Place) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)]).to(place.device)


def shard(model: nn.Module, place: Place, **options: object) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place.device, **options)


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets of all batches of all ranks."""
    x = torch.randn(NUM_BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x + x.roll(1, dims=1)


def batches(place: Place, *, of_all_ranks: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The batches of this rank, or those of a single process."""
    x, y = (part.to(place.device).split(BATCH) for part in data())
    if of_all_ranks:
        return list(zip(x, y, strict=True))
    mine = [[whole.chunk(place.num_ranks)[place.rank] for whole in part] for part in (x, y)]
    return list(zip(*mine, strict=True))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


def train(
    model: nn.Module, pairs: list[tuple[Tensor, Tensor]], max_norm: float | None = None, *, set_to_none: bool = True
) -> list[float]:
    """Trains one step for each batch; returns the losses, averaged over the ranks if the model is sharded."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for x, y in pairs:
        loss = loss_of(model, x, y)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        if max_norm is not None and isinstance(model, FSDP):
            model.clip_grad_norm_(max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def close(ours: list[float], theirs: list[float], tolerance: float = 1e-4) -> bool:
    return all(abs(one - other) <= tolerance * abs(other) for one, other in zip(ours, theirs, strict=True))


# ---- 1 ----


def accumulate(model: nn.Module, pairs: list[tuple[Tensor, Tensor]], *, without_sync: bool) -> list[Tensor]:
    """Trains in windows of batches, the last one not full; returns the gradients within a window."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    for start in range(0, len(pairs), WINDOW):
        window = pairs[start : start + WINDOW]
        for number, (x, y) in enumerate(window):
            is_last = number == len(window) - 1
            with model.no_sync() if without_sync and not is_last else nullcontext():
                (loss_of(model, x, y) / len(window)).backward()
                if not is_last:
                    seen = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def lesson_accumulation(place: Place) -> None:
    plain = build(place)
    accumulate(plain, batches(place, of_all_ranks=True), without_sync=False)
    sizes, reductions = {}, {}
    for without_sync in (False, True):
        model = shard(build(place), place)
        with trace.record() as recorder:
            seen = accumulate(model, batches(place), without_sync=without_sync)
        sizes[without_sync], reductions[without_sync] = sum(g.numel() for g in seen), recorder.count("RS")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    whole = sum(p.numel() for p in plain.parameters())
    say(
        place,
        f"1. {NUM_BATCHES} batches in windows of {WINDOW}: the weights of a single process, with and without no_sync",
    )
    say(
        place,
        f"   without it {reductions[False]} reduce-scatters, each rank keeps {sizes[False]:,} numbers of gradients",
    )
    say(place, f"   with it    {reductions[True]} reduce-scatters, each rank keeps {sizes[True]:,} of {whole:,}")
    num_windows = -(-NUM_BATCHES // WINDOW)
    assert reductions == {False: NUM_BLOCKS * NUM_BATCHES, True: NUM_BLOCKS * num_windows}
    assert sizes[True] >= whole > sizes[False]


# ---- 2 ----


def lesson_clipping(place: Place, max_norm: float = 0.5) -> None:
    plain, model = build(place), shard(build(place), place)
    loss_of(plain, *batches(place, of_all_ranks=True)[0]).backward()
    loss_of(model, *batches(place)[0]).backward()
    true_norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf")).item()
    of_slices = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    norms = from_all_ranks((of_slices, model.clip_grad_norm_(max_norm).item()))
    after = model.clip_grad_norm_(float("inf")).item()
    say(place, f"2. norm of all gradients {true_norm:.4f}; by the method {norms[0][1]:.4f}, clipped to {after:.4f}")
    say(place, "   by torch's function " + ", ".join(f"{own:.4f} on rank {r}" for r, (own, _) in enumerate(norms)))
    assert len({own for own, _ in norms}) == place.num_ranks, "every rank has different gradients"
    assert all(abs(norm - true_norm) < 1e-5 * true_norm for _, norm in norms)
    assert abs(after - max_norm) < 1e-4
    plainly = train(build(place), batches(place, of_all_ranks=True), max_norm)
    assert close(train(shard(build(place), place), batches(place), max_norm), plainly)


# ---- 3 ----


def lesson_float16(place: Place, unlucky_step: int = 3) -> None:
    model = shard(build(place), place, mixed_precision=MixedPrecision(torch.float16, torch.float32, torch.float16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = ShardedGradScaler(place.device.type, init_scale=2.0**10)
    losses, scales, steps = [], [], []
    for number, (x, y) in enumerate(batches(place)):
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number == unlucky_step and place.rank == place.num_ranks - 1:
            next(iter(model.parameters())).grad[0] = float("inf")  # An element that only this rank stores.
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(mean_over_ranks(loss))
        scales.append(scaler.get_scale())
        steps.append(int(next(iter(optimizer.state.values()))["step"]))
    say(place, f"3. float16: loss {losses[0]:.3f} to {losses[-1]:.3f}; an infinity on one rank in step {unlucky_step}:")
    for rank, (taken, scale) in enumerate(from_all_ranks((steps, scales))):
        say(place, f"   rank {rank} has taken {taken} steps, scale {scale[0]:.0f}, then {scale[-1]:.0f}")
    expected = [number + 1 - (number >= unlucky_step) for number in range(NUM_BATCHES)]
    assert all(theirs == (expected, scales) for theirs in from_all_ranks((steps, scales)))
    assert scales == [2.0**10] * unlucky_step + [2.0**9] * (NUM_BATCHES - unlucky_step)
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---- 4 ----


def lesson_checkpointing(place: Place, plain: list[float]) -> None:
    kept, gathers, names = {}, {}, {}
    for checkpointed in (False, True):
        model = shard(build(place), place)
        if checkpointed:
            wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            apply_activation_checkpointing(
                model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
            )
        with trace.record() as recorder:
            losses = train(model, batches(place))
        gathers[checkpointed], names[checkpointed] = recorder.count("AG"), list(model.state_dict())
        kept[checkpointed] = saved_for_backward(model, batches(place)[0])
        assert close(losses, plain)
    say(place, f"4. activation checkpointing: {kept[False]:,} numbers kept for backward, then {kept[True]:,};")
    say(place, f"   {gathers[False]} gathers, then {gathers[True]}; the same losses and names")
    assert kept[True] < kept[False] / 3
    assert gathers[True] == gathers[False] == 2 * NUM_BLOCKS * NUM_BATCHES
    assert names[True] == names[False] == list(build(place).state_dict())


def saved_for_backward(model: nn.Module, pair: tuple[Tensor, Tensor]) -> int:
    """The number of elements that a forward saves for backward, without the views of parameters."""
    counts: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        counts.append(tensor.numel() if tensor.shape[:1] == pair[0].shape[:1] else 0)
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        loss_of(model, *pair).backward()
    return sum(counts)


# ---- 5 and 6 ----


def lesson_compilation(place: Place, plain: list[float], backend: str) -> None:
    model = torch.compile(shard(build(place), place, use_orig_params=True), backend=backend)
    losses = train(model, batches(place))
    say(place, f"5. compiled ({backend}): last loss {losses[-1]:.6f}, plain {plain[-1]:.6f}")
    assert close(losses, plain)


def lesson_loaders(place: Place) -> None:
    everything = TensorDataset(*data())
    variants = {
        "plain": {},
        "zeroed": {},
        "workers": {"num_workers": 1, "persistent_workers": True, "pin_memory": place.device.type == "cuda"},
    }
    losses = {}
    for name, options in variants.items():
        sampler = DistributedSampler(everything, place.num_ranks, place.rank, shuffle=True)
        loader = DataLoader(everything, batch_size=BATCH // place.num_ranks, sampler=sampler, shuffle=False, **options)
        model = shard(build(place), place)
        pairs = [(x.to(place.device), y.to(place.device)) for x, y in loader]
        losses[name] = train(model, pairs, set_to_none=name != "zeroed")
    say(place, f"6. last loss {losses['plain'][-1]:.6f} without and {losses['workers'][-1]:.6f} with a worker process")
    assert losses["plain"] == losses["workers"] == losses["zeroed"]


# ---- 7 ----


def lesson_alone(place: Place) -> None:
    if place.backend != "gloo":
        say(place, "7. not run: NCCL ends the whole process after a time-out")
        return
    patient = dist.new_group(timeout=timedelta(seconds=4))
    model = FSDP(build(place), process_group=patient, device_id=place.device)
    problem = ""
    if place.rank == 0:
        try:
            model(batches(place)[0][0])
        except RuntimeError as error:
            problem = str(error)
    # The ranks synchronize on the default group, which still works.
    problems = from_all_ranks(problem)
    first_line = problems[0].partition("\n")[0]
    say(place, f"7. rank 0 evaluates alone, and after four seconds: {first_line[-70:]}")
    assert "Timed out" in problems[0]
    assert problems[1] == ""


def lesson(options: argparse.Namespace, place: Place) -> None:
    plain = train(build(place), batches(place, of_all_ranks=True))
    assert close(train(shard(build(place), place), batches(place)), plain)
    assert plain[-1] < plain[0]
    say(place, f"losses of a single process {plain[0]:.6f} to {plain[-1]:.6f}")
    lesson_accumulation(place)
    lesson_clipping(place)
    lesson_float16(place)
    lesson_checkpointing(place, plain)
    lesson_compilation(place, plain, options.backend)
    lesson_loaders(place)
    lesson_alone(place)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The knobs of a training loop with FSDP.")
    parser.add_argument(
        "--backend",
        default="eager",
        help="backend of torch.compile; default: %(default)s, which needs no C++ compiler and is not faster",
    )
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))
