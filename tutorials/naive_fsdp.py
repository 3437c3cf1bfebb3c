"""FSDP from scratch, in six steps; after each step, the model trains and has the same losses.

    torchrun --standalone --nproc-per-node 2 tutorials/naive_fsdp.py

Output: for each step, the losses, the number of collectives and the memory; then a comparison with minifsdp.

It takes a few seconds on two CPU cores. The model has four equal blocks. Each block becomes a *unit*. The parameters of
a unit are concatenated into one flat parameter. Two ranks train on different halves of each batch. Every step is
compared with single-process training on whole batches: the losses must be the same.

What you learn, step by step:

1. **Shard.** Every rank stores one half of each flat parameter, its *shard*. The optimizer updates this shard. Before a
   training step, all units are all-gathered. After it, the gradients are summed over the ranks, and each rank takes its
   half. This is already correct and saves memory: each rank stores only half of Adam's two averages, which need the
   most memory.
2. **All-gather before forward.** The last block is not needed while the first block computes. So a hook all-gathers
   each unit immediately before its own forward.
3. **Free, and all-gather again in backward.** After its forward, the unsharded parameter of a unit is freed. A hook on
   the *output* of the unit all-gathers it again, because autograd computes the gradient of the output before all other
   gradients of the unit. Now only one unit is unsharded at a time, but each unit needs a second all-gather.
4. **Reduce-scatter.** In the previous steps, each rank receives the sum of all gradients and discards one half of it. A
   reduce-scatter sends only the half that the rank keeps. It can run as soon as the gradient of *this* unit is
   complete.
5. **Prefetch.** The all-gather of the next unit is issued before the gradients of the current unit are computed, so
   that both run at the same time. Then two units are unsharded for a short time. This needs more memory. On a GPU it
   can save time.
6. **Compare.** The order of events is exactly the same as in ``minifsdp``. Its engine also supports shared parameters,
   several dtypes, frozen parameters and streams, and reports errors.

Three techniques make this possible in PyTorch. The comments mark them with A, B and C.

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
    """The parameters of one module: a shard that the optimizer updates, and a flat parameter that autograd uses."""

    def __init__(self, name: str, module: nn.Module, log: Log) -> None:
        self.name, self.module, self.log = name, module, log
        owners = [(m, name, p) for m in module.modules() for name, p in m.named_parameters(recurse=False)]
        self.slots = [(m, name, p.shape) for m, name, p in owners]
        flat = torch.cat([p.detach().flatten() for _, _, p in owners])
        # Padding makes all shards equally long, so one all-gather works without a table of sizes.
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % dist.get_world_size()))
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        # A. Two tensors: the shard is small and always allocated; the flat parameter is large and freed when unused.
        self.flat = torch.empty_like(flat).requires_grad_()
        self.num_bytes = flat.numel() * flat.element_size()
        self.flat.untyped_storage().resize_(0)
        self.arriving: dist.Work | None = None
        for m, name, _ in self.slots:
            delattr(m, name)

    def gather(self) -> None:
        """Issues the all-gather, unless the unit is already unsharded or an all-gather is in flight."""
        if self.flat.untyped_storage().size() > 0:
            return
        self.log.add("AG", self)
        # B. The storage is resized, but the tensor object stays the same, because autograd saves views of it during
        #    forward. `.data` hides the write from autograd, which would otherwise report an in-place modification.
        self.flat.untyped_storage().resize_(self.num_bytes)
        local_shards = list(self.flat.data.chunk(dist.get_world_size()))
        self.arriving = dist.all_gather(local_shards, self.shard.data, async_op=True)

    def wait(self) -> None:
        """Waits for the all-gather. Afterwards the flat parameter can be read."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None

    def show(self) -> None:
        """Waits for the all-gather, and sets views of the flat parameter as the module's parameters."""
        self.wait()
        start = 0
        for module, name, shape in self.slots:
            setattr(module, name, self.flat[start : start + shape.numel()].view(shape))
            start += shape.numel()

    def free(self) -> None:
        """Frees the memory of the flat parameter."""
        self.log.add("FREE", self)
        self.flat.untyped_storage().resize_(0)

    def all_reduce(self) -> None:
        """Sums the unsharded gradient over the ranks, and keeps this rank's shard of it."""
        self.log.add("AR", self)
        dist.all_reduce(self.flat.grad)
        self.shard.grad = self.flat.grad.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
        self.flat.grad = None

    def reduce_scatter(self) -> None:
        """Like `all_reduce`, but each rank receives only its shard of the sum."""
        self.log.add("RS", self)
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(self.flat.grad.chunk(dist.get_world_size())))
        self.shard.grad /= dist.get_world_size()
        self.flat.grad = None


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


# ---- the steps. Each returns the calls that the training loop must still make; hooks make all other calls ----


@dataclass
class ManualCalls:
    """The calls that the training loop makes for every unit, before forward and after backward."""

    before_forward: tuple[Callable[[Unit], None], ...] = ()
    after_backward: tuple[Callable[[Unit], None], ...] = ()


def shard(units: list[Unit]) -> ManualCalls:
    # 1. There are no hooks yet.
    return ManualCalls(before_forward=(Unit.gather, Unit.show), after_backward=(Unit.all_reduce, Unit.free))


def gather_before_forward(units: list[Unit]) -> ManualCalls:
    # 2. The forward of a unit all-gathers it.
    for unit in units:
        on_forward(unit)
    return ManualCalls(after_backward=(Unit.all_reduce, Unit.free))


def free_and_gather_again(units: list[Unit]) -> ManualCalls:
    # 3. Forward also frees the unit. Backward all-gathers it, and frees it when its gradient is complete.
    for unit in units:
        on_forward(unit)
        on_output(unit)
        on_gradient(unit, Unit.free)
    return ManualCalls(after_backward=(Unit.all_reduce,))


def reduce_and_scatter(units: list[Unit]) -> ManualCalls:
    # 4. A hook reduces each complete gradient immediately, so the training loop makes no calls.
    for unit in units:
        on_forward(unit)
        on_output(unit)
        on_gradient(unit, Unit.free, Unit.reduce_scatter)
    return ManualCalls()


def prefetch(units: list[Unit]) -> ManualCalls:
    # 5. Backward runs the units from the last to the first, so the next unit is the previous one in this list.
    for unit, next_one in zip(units, [None, *units[:-1]], strict=True):
        on_forward(unit)
        on_output(unit, next_one)
        on_gradient(unit, Unit.free, Unit.reduce_scatter)
    return ManualCalls()


def on_forward(unit: Unit) -> None:
    def before_forward(*_: object) -> None:
        unit.gather()
        unit.show()
        unit.log.events.append(f"F {unit.name}")

    unit.module.register_forward_pre_hook(before_forward)


def on_output(unit: Unit, next_one: Unit | None = None) -> None:
    """Frees the unit after forward. A hook on the output all-gathers it again, and prefetches ``next_one``."""

    def before_backward(_: Tensor) -> None:
        unit.gather()
        if next_one is not None:
            next_one.gather()
        # The module needs no new views: because of B, the tensors that autograd saved are views of `unit.flat`.
        unit.wait()

    def after_forward(_: nn.Module, __: object, output: Tensor) -> None:
        unit.free()
        output.register_hook(before_backward)

    unit.module.register_forward_hook(after_forward)


def on_gradient(unit: Unit, *calls: Callable[[Unit], None]) -> None:
    """C. The hook of a leaf runs after *all* uses have contributed, so the gradient of the unit is complete."""

    def after_backward(_: Tensor) -> None:
        for call in calls:
            call(unit)

    unit.flat.register_post_accumulate_grad_hook(after_backward)


# ---- the lesson ----


def build(place: Place) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)]).to(place.device)


def batch(step: int, place: Place) -> tuple[Tensor, Tensor]:
    """The batch of a step for all ranks. The target adds its neighbour to each element."""
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


def sharded_losses(set_up: Callable[[list[Unit]], ManualCalls], place: Place, log: Log) -> list[float]:
    model, losses = build(place), []
    units = [Unit(name, block, log) for name, block in model.named_children()]
    manual = set_up(units)
    optimizer = torch.optim.Adam([unit.shard for unit in units], lr=1e-2)
    for step in range(NUM_STEPS):
        log.events.clear()
        x, y = (whole.chunk(place.num_ranks)[place.rank] for whole in batch(step, place))
        for call, unit in product(manual.before_forward, units):
            call(unit)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for call, unit in product(manual.after_backward, units):
            call(unit)
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
    say(place, f"\n{'step':<24}{'last loss':>10}{'peak unsharded':>16}{'AG':>5}{'AR':>4}{'RS':>4}")
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

    # 6. `log` is the log of step 5.
    theirs = order_of_minifsdp(place)
    say(place, "\nthe last step of prefetch      " + " ".join(log.events[:9]) + " ...")
    say(place, "the first step of minifsdp     " + " ".join(theirs[:9]) + " ...")
    assert log.events == theirs
    say(place, f"the same {len(theirs)} events in the same order")


if __name__ == "__main__":
    on_ranks(lesson)
