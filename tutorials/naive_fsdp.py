"""FSDP from nothing, in six steps; after each step the model trains, and reaches the same losses.

    torchrun --standalone --nproc-per-node 2 tutorials/naive_fsdp.py

Output: after each step the same losses, more all-gathers and less memory; at the end the events of minifsdp.

It takes a few seconds on two CPU cores. The model is four equal blocks. Each becomes a *unit*, whose parameters are
concatenated into one flat tensor, the *row*. Two ranks train on different halves of each batch. Every step is compared
with single-process training on whole batches: the losses must be the same.

What you learn, step by step:

1. **Shard.** Every rank keeps one half of each row, and the optimizer owns this half. Before a training step all rows
   are all-gathered. After it, the gradients are summed over the ranks and each rank takes its half. This is already
   correct and already saves memory: Adam's two averages, most of the memory, are now halved.
2. **All-gather before forward.** The last block is not needed while the first one computes. A hook all-gathers each
   unit right before its own forward.
3. **Free, and all-gather again in backward.** After its forward a unit's row is freed. A hook on its *output* brings it
   back: of all the unit's gradients, that of the output arrives first. Now only one unit is unsharded at a time. The
   price is a second all-gather.
4. **Reduce-scatter.** Until here each rank received the sum of all gradients and discarded one half of it. A
   reduce-scatter delivers only the half that is kept, and it can run as soon as *this* unit's gradient is complete.
5. **Prefetch.** The all-gather of the next unit is issued before the current one's gradients are computed, so that both
   can happen at the same time. For a moment two units are unsharded: this costs memory and saves time.
6. **Compare.** The order of events is exactly that of ``minifsdp``. Its engine is this file plus what the other files
   of the package explain: shared parameters, several dtypes, frozen parameters, streams, errors.

The three tricks without which none of this works in PyTorch are marked A, B and C.

Spec: PAR-01, SHARD-02, SHARD-04, PREF-02.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from common import Block, Place, mean_over_ranks, on_ranks, say
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, trace
from minifsdp.wrap import ModuleWrapPolicy

NUM_BLOCKS, WIDTH, NUM_STEPS, BATCH = 4, 32, 5, 48


class Unit:
    """The parameters of one module: a slice that the optimizer owns, and a row that autograd uses."""

    def __init__(self, name: str, module: nn.Module, log: Log) -> None:
        self.name, self.module, self.log = name, module, log
        owners = [(m, name, p) for m in module.modules() for name, p in m.named_parameters(recurse=False)]
        self.slots = [(m, name, p.shape) for m, name, p in owners]
        row = torch.cat([p.detach().flatten() for _, _, p in owners])
        # Padding makes all slices equally long, so one all-gather works without a table of sizes.
        row = torch.nn.functional.pad(row, (0, -row.numel() % dist.get_world_size()))
        self.slice = nn.Parameter(row.chunk(dist.get_world_size())[dist.get_rank()].clone())
        # A. Two variables: the optimizer's is small and permanent; autograd's is the whole row, freed when unused.
        self.row = torch.empty_like(row).requires_grad_()
        self.num_bytes = row.numel() * row.element_size()
        self.row.untyped_storage().resize_(0)
        self.arriving: dist.Work | None = None
        for m, name, _ in self.slots:
            delattr(m, name)

    def gather(self) -> None:
        """Issues the all-gather of the row, unless the row is already here or on its way."""
        if self.row.untyped_storage().size() > 0:
            return
        self.log.add("AG", self)
        # B. The memory shrinks and grows but the tensor stays the same one, because autograd saves views of it during
        #    forward. `.data` hides the write from autograd, which would otherwise report an in-place modification.
        self.row.untyped_storage().resize_(self.num_bytes)
        local_shards = list(self.row.data.chunk(dist.get_world_size()))
        self.arriving = dist.all_gather(local_shards, self.slice.data, async_op=True)

    def wait(self) -> None:
        """Waits for the all-gather. The row can be read afterwards."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None

    def show(self) -> None:
        """Waits for the row, and sets views of it as the module's parameters."""
        self.wait()
        start = 0
        for module, name, shape in self.slots:
            setattr(module, name, self.row[start : start + shape.numel()].view(shape))
            start += shape.numel()

    def free(self) -> None:
        """Frees the memory of the row."""
        self.log.add("FREE", self)
        self.row.untyped_storage().resize_(0)

    def all_reduce(self) -> None:
        """Sums the whole gradient over the ranks, and keeps one slice of it."""
        self.log.add("AR", self)
        dist.all_reduce(self.row.grad)
        self.slice.grad = self.row.grad.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
        self.row.grad = None

    def reduce_scatter(self) -> None:
        """Like `all_reduce`, but each rank receives only the slice that it keeps."""
        self.log.add("RS", self)
        self.slice.grad = torch.empty_like(self.slice)
        dist.reduce_scatter(self.slice.grad, list(self.row.grad.chunk(dist.get_world_size())))
        self.slice.grad /= dist.get_world_size()
        self.row.grad = None


class Log:
    """The events of the last step, and the largest number of bytes that were unsharded at the same time.

    ``AG`` is an all-gather, ``AR`` an all-reduce, ``RS`` a reduce-scatter, ``F`` a forward.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.whole: dict[Unit, int] = {}
        self.peak = 0

    def add(self, kind: str, unit: Unit) -> None:
        """Records one event."""
        self.events.append(f"{kind} {unit.name}")
        if kind == "AG":
            self.whole[unit] = unit.num_bytes
        elif kind == "FREE":
            del self.whole[unit]
        self.peak = max(self.peak, sum(self.whole.values()))


# ---- the steps. Each returns the calls that the training loop must still make manually; hooks make all others ----


@dataclass
class ByHand:
    """What the training loop does for every unit before forward and after backward."""

    before_forward: tuple[Callable[[Unit], None], ...] = ()
    after_backward: tuple[Callable[[Unit], None], ...] = ()


def shard(units: list[Unit]) -> ByHand:
    # 1. There are no hooks yet.
    return ByHand(before_forward=(Unit.gather, Unit.show), after_backward=(Unit.all_reduce, Unit.free))


def gather_before_forward(units: list[Unit]) -> ByHand:
    # 2. The forward of a unit all-gathers its row.
    for unit in units:
        on_forward(unit)
    return ByHand(after_backward=(Unit.all_reduce, Unit.free))


def free_and_gather_again(units: list[Unit]) -> ByHand:
    # 3. Forward also frees it; backward all-gathers it, and frees it when its gradient is complete.
    for unit in units:
        on_forward(unit)
        on_output(unit)
        on_gradient(unit, Unit.free)
    return ByHand(after_backward=(Unit.all_reduce,))


def reduce_and_scatter(units: list[Unit]) -> ByHand:
    # 4. A complete gradient is reduced immediately, so no manual calls are left.
    for unit in units:
        on_forward(unit)
        on_output(unit)
        on_gradient(unit, Unit.free, Unit.reduce_scatter)
    return ByHand()


def prefetch(units: list[Unit]) -> ByHand:
    # 5. Backward runs the units from the last to the first, so the next unit is the one before.
    for unit, next_one in zip(units, [None, *units[:-1]], strict=True):
        on_forward(unit)
        on_output(unit, next_one)
        on_gradient(unit, Unit.free, Unit.reduce_scatter)
    return ByHand()


def on_forward(unit: Unit) -> None:
    def before_forward(*_: object) -> None:
        unit.gather()
        unit.show()
        unit.log.events.append(f"F {unit.name}")

    unit.module.register_forward_pre_hook(before_forward)


def on_output(unit: Unit, next_one: Unit | None = None) -> None:
    """Frees the row after forward. A hook on the output all-gathers it again, together with that of ``next_one``."""

    def before_backward(_: Tensor) -> None:
        unit.gather()
        if next_one is not None:
            next_one.gather()
        # The module needs no new views: because of B, the tensors that autograd saved are views of this row.
        unit.wait()

    def after_forward(_: nn.Module, __: object, output: Tensor) -> None:
        unit.free()
        output.register_hook(before_backward)

    unit.module.register_forward_hook(after_forward)


def on_gradient(unit: Unit, *verbs: Callable[[Unit], None]) -> None:
    """C. The hook of a leaf runs when *all* uses of it have contributed: the gradient of the whole unit is complete."""

    def after_backward(_: Tensor) -> None:
        for verb in verbs:
            verb(unit)

    unit.row.register_post_accumulate_grad_hook(after_backward)


# ---- the lesson ----


def build(place: Place) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)]).to(place.device)


def batch(step: int, place: Place) -> tuple[Tensor, Tensor]:
    """The whole batch of a step. The target adds each element's neighbour to it. Each rank trains on its own part."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(place.device)
    return x, x + x.roll(1, dims=1)


def plain_losses(place: Place) -> list[float]:
    model, losses = build(place), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        x, y = batch(step, place)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded_losses(set_up: Callable[[list[Unit]], ByHand], place: Place, log: Log) -> list[float]:
    model, losses = build(place), []
    units = [Unit(name, block, log) for name, block in model.named_children()]
    by_hand = set_up(units)
    optimizer = torch.optim.Adam([unit.slice for unit in units], lr=1e-2)
    for step in range(NUM_STEPS):
        log.events.clear()
        x, y = (whole.chunk(place.num_ranks)[place.rank] for whole in batch(step, place))
        for verb, unit in product(by_hand.before_forward, units):
            verb(unit)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for verb, unit in product(by_hand.after_backward, units):
            verb(unit)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def order_of_minifsdp(place: Place) -> list[str]:
    """The events of one training step of the same model, as ``minifsdp`` itself records them."""
    model = FullyShardedDataParallel(
        build(place), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place.device, forward_prefetch=False
    )
    x, y = (whole.chunk(place.num_ranks)[place.rank] for whole in batch(0, place))
    with trace.record() as recorder:
        nn.functional.mse_loss(model(x), y).backward()
    return recorder.order("AG", "F", "FREE", "RS")


def lesson(place: Place) -> None:
    plain = plain_losses(place)
    block = sum(p.numel() for p in build(place)[0].parameters()) * 4
    say(place, f"{NUM_BLOCKS} blocks of {block:,} bytes; plain losses " + " ".join(f"{loss:.5f}" for loss in plain))
    say(place, f"\n{'step':<24}{'last loss':>10}{'whole at once':>16}{'AG':>5}{'AR':>4}{'RS':>4}")
    peaks = []
    for set_up in (shard, gather_before_forward, free_and_gather_again, reduce_and_scatter, prefetch):
        log = Log()
        losses = sharded_losses(set_up, place, log)
        counts = [sum(event.startswith(kind) for event in log.events) for kind in ("AG", "AR", "RS")]
        say(place, f"{set_up.__name__:<24}{losses[-1]:>10.5f}{log.peak:>16,}{counts[0]:>5}{counts[1]:>4}{counts[2]:>4}")
        peaks.append(log.peak)
        # Adam divides by the size of the gradient, which can enlarge a difference in its last digit.
        assert all(abs(ours - theirs) < 1e-4 * theirs for ours, theirs in zip(losses, plain, strict=True)), set_up
    assert losses[-1] < 0.7 * losses[0]
    assert peaks == [NUM_BLOCKS * block, NUM_BLOCKS * block, block, block, 2 * block]

    # 6. `log` is left over from step 5.
    theirs = order_of_minifsdp(place)
    say(place, "\nthe last step of the last one  " + " ".join(log.events[:9]) + " ...")
    say(place, "the first step of minifsdp     " + " ".join(theirs[:9]) + " ...")
    assert log.events == theirs
    say(place, f"the same {len(theirs)} events in the same order")


if __name__ == "__main__":
    on_ranks(lesson)
