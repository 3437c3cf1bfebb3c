"""The exercises of the learning pages. A question is a docstring; the function below it computes the answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from docs_build.pictures import events_of
from docs_build.recordings import find
from docs_build.values import zero_gigabytes
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.shards import padded_shard_numel, shard_shape
from minifsdp.engine.unit import Unit, UnitPolicy
from minifsdp.tools.events import peak_gathered_bytes
from minifsdp.tools.formulas import hybrid_cross_host, hybrid_cross_host_as_printed

__all__ = ["exercise"]


def exercise(name: str) -> tuple[str, str]:
    """Question and answer, both Markdown.

    Raises:
        KeyError: there is no exercise with that name.
    """
    function = EXERCISES[name]
    return inspect.getdoc(function) or "", function()


def zero_stage_3() -> str:
    """A model has 7.5 billion parameters. It is trained by Adam in mixed precision: 2 bytes for a parameter, 2 for its
    gradient, 12 for the optimizer (a float32 copy and two averages). How many GB does each of 64 ranks store if the
    optimizer state is sharded? If the gradients are sharded too? If the parameters are?
    """
    first, second, third = zero_gigabytes(7.5, 64)
    return (
        f"Without sharding {16 * 7.5:g} GB. Optimizer state sharded: (2 + 2 + 12/64) x 7.5 = **{first:.1f} GB**. "
        "Gradients "
        f"too: (2 + 14/64) x 7.5 = **{second:.1f} GB**. All of it: 16/64 x 7.5 = **{third:.2f} GB**. "
        "These are the numbers of Figure 1 of the ZeRO paper."
    )


def sum_of_two() -> str:
    """Three ranks have the gradients `[1 2 3 4 5 6]`, `[0 1 0 1 0 1]` and `[9 7 5 3 1 0]`. What does a reduce-scatter
    return on each rank, and what an all-gather of the results? Which single collective has the same result?
    """
    gradients = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1], [9, 7, 5, 3, 1, 0]])
    pieces = gradients.sum(0).chunk(3)
    whole = torch.cat(pieces)
    given = ", ".join(f"`{piece.tolist()}` to rank {rank}" for rank, piece in enumerate(pieces))
    return (
        f"The reduce-scatter gives {given}. The all-gather gives `{whole.tolist()}` to all of them. An "
        "**all-reduce** of the gradients has the same result. The two collectives together send as many bytes as the "
        "all-reduce. So storing only a shard between them saves memory without additional traffic."
    )


def one_unit() -> str:
    """The recorded model has four equal blocks and a small root. What is the peak of unsharded parameters if each block
    is a unit? And if the whole model is one unit?
    """
    blocks = peak_gathered_bytes(events_of("fsdp1-full-pre-block-2-wide")[0])
    whole = peak_gathered_bytes(events_of("fsdp1-full-pre-whole-2-wide")[0])
    units = find("fsdp1-full-pre-block-2-wide")["units"]
    block = max(unit["bytes"] for unit in units)
    root = min(unit["bytes"] for unit in units)
    return (
        f"One unit: **{whole:,} bytes**, the whole model, so sharding saves nothing during compute. A unit for each "
        "block: "
        f"**{blocks:,} bytes**, which is two blocks of {block:,} (the block that computes and the block that backward "
        "prefetched) "
        f"and {root:,} for the root."
    )


def five_rows() -> str:
    """`fully_shard` shards a weight of shape (5, 8) over four ranks. How many rows does each rank have? How many
    elements does each rank send?
    """
    shape = torch.Size((5, 8))
    rows, sent = [shard_shape(shape, 0, 4, rank)[0] for rank in range(4)], padded_shard_numel(shape, 0, 4)
    return (
        f"Rows: **{', '.join(map(str, rows))}**. Each rank gets {rows[0]} rows until no rows are left. Each rank "
        f"sends **{sent}** elements. These are {4 * sent} elements for a weight of {5 * 8}. "
        "The rest is padding."
    )


def padding() -> str:
    """A unit has parameters of 3, 4 and 6 elements; four ranks shard its flat parameter. Which elements of the last
    parameter does rank 2 store?
    """
    sharding = FlatSharding((3, 4, 6), 4)
    part = sharding.range_in_param(2, 2)
    return (
        f"The flat parameter has {sharding.numel} elements and is padded to {sharding.padded_numel}, so each rank "
        f"stores {sharding.shard_numel}. Rank 2 has the elements {sharding.shard_range(2).start} to "
        f"{sharding.shard_range(2).stop - 1} of the "
        f"flat parameter. In the last parameter, these are the elements **{part.start} to {part.stop - 1}**."
    )


def root_padding() -> str:
    """In the model of the step player, the root unit has the parameters outside of all blocks: a layer of 16 to 64 and
    one of 64 to 1, biases included, 1153 numbers in float32. How many bytes does the unsharded root have on two ranks,
    for each layout?
    """
    flat = find("fsdp1-full-pre-block-2")["units"]
    per_parameter = find("fsdp2-full-pre-block-2")["units"]
    sizes = [next(u["bytes"] for u in units if u["name"] == "") for units in (flat, per_parameter)]
    return (
        f"4 x 1153 = {4 * 1153:,} bytes without padding. Flat: one element of padding, **{sizes[0]:,} bytes**. Per "
        "parameter: "
        "the last layer has a weight of one row with 64 elements and a bias of 1 element. Both are padded to two rows: "
        f"**{sizes[1]:,} bytes**."
    )


def who_is_whole() -> str:
    """Which transitions of the state machine does an unnecessary prefetch take? Why must the unit wait for its
    all-gather although it does not use the result?
    """
    seen: list[str] = []
    unit = _watched_unit(seen)
    for verb in (unit.unshard, unit.reshard):
        verb()
        seen.append(unit.state.name)
    return (
        f"`SHARDED -> {seen[0]} -> {seen[-1]}`. Steps of `reshard`, in this order: "
        f"**{', '.join(seen[1:-1])}**. The all-gather still writes to the unsharded memory. If the rank freed this "
        "memory without waiting, other tensors could get it and would be overwritten. The other ranks take part in "
        "the same collective and would wait if this rank left it."
    )


class _Layout(SimpleNamespace):
    """Unlike its base class, it supports weak references and is hashable."""

    __hash__ = object.__hash__


def _watched_unit(seen: list[str]) -> Unit:
    """A unit whose layout only records the calls it receives."""

    def free() -> None:
        seen.append("free the memory")

    handle = SimpleNamespace(wait=lambda: seen.append("wait for the all-gather"))
    layout = _Layout(gather=lambda _: handle, use_sharded_params=lambda: None, free=free, offloads=False)
    unit = Unit(
        torch.nn.Identity(), cast(Any, layout), cast(Any, None), cast(Any, None), UnitPolicy(reshard_after_forward=True)
    )
    unit.join(cast(Any, None), RateLimiter(enabled=False))
    return unit


def first_gather_of_backward() -> str:
    """In the timeline above, how many all-gathers does the root have in one step, and how many does each block have?
    Why is there a difference?
    """
    events = events_of("fsdp1-full-off-block-2-wide")[0]
    gathers = [event.unit for event in events if event.kind == "AG"]
    counts = {unit: gathers.count(unit) for unit in dict.fromkeys(gathers)}
    listed = ", ".join(f"{unit or 'root'}: {number}" for unit, number in counts.items())
    return (
        f"Counted: {listed}. The root's backward follows its forward immediately, so the root stays unsharded. A "
        "block is "
        "resharded after its forward, and all-gathered again when the gradient of its output arrives."
    )


def two_by_two() -> str:
    """A mesh of 2 x 2: ranks 0 and 1 shard, 2 and 3 are their replicas. The gradients of one unit are all 1 on rank 0,
    all 2 on rank 1, and so on. What does each rank hold after the reduce-scatter, after the all-reduce, after the
    division?
    """
    whole = [torch.full((4,), float(rank + 1)) for rank in range(4)]
    rows = [whole[0] + whole[1], whole[0] + whole[1], whole[2] + whole[3], whole[2] + whole[3]]
    scattered = [rows[rank].chunk(2)[rank % 2] for rank in range(4)]
    reduced = [scattered[rank % 2] + scattered[rank % 2 + 2] for rank in range(4)]
    scaling = Scaling.mean(4, torch.float32)
    for piece in reduced:
        scaling.complete(piece)
    return (
        f"After the reduce-scatter: {', '.join(str(p.tolist()) for p in scattered)}. After the all-reduce: 10 on all "
        "ranks. After the division by "
        f"{scaling.after:g}: **{reduced[0].tolist()}** on each rank, the mean of 1, 2, 3 and 4."
    )


def overflow() -> str:
    """Eight ranks each have a gradient of 16 000 in float16, whose largest number is 65 504. What is the mean if it is
    divided after the sum? What does the engine do instead?
    """
    numbers = torch.full((8,), 16000.0, dtype=torch.float16)
    late = torch.zeros((), dtype=torch.float16)
    for number in numbers:
        late = late + number
    scaling = Scaling.mean(8, torch.float16)
    early = torch.zeros((), dtype=torch.float16)
    for number in numbers / scaling.before:
        early = early + number
    return (
        f"After the sum: {late.item() / 8}. The engine divides by {scaling.before:g} before and by {scaling.after:g} "
        "after "
        f"the sum: **{early.item() / scaling.after:g}**. In bfloat16 and float32 the sum does not overflow, so it "
        "divides only once, after the sum."
    )


def post_order() -> str:
    """With `BACKWARD_POST`, what is the order of `AG2`, `FREE3` and `RS3` after the gradients of block 3 complete?"""
    events = events_of("fsdp1-full-post-block-2-wide")[0]
    wanted = [("AG", "block2"), ("FREE", "block3"), ("RS", "block3")]
    start = max(n for n, e in enumerate(events) if e.kind == "B" and e.unit.endswith("block3"))
    found = [
        f"{e.kind}{e.unit[-1]}" for e in events[start:] if any(e.kind == k and e.unit.endswith(u) for k, u in wanted)
    ]
    return (
        f"As recorded: **{' '.join(found[:3])}**. The engine reshards first, to have memory for the next all-gather. "
        "It reduces last, because no computation waits for the result."
    )


def alive() -> str:
    """How many units are unsharded at the same time, at most, in a step with `BACKWARD_PRE`? And without prefetch?
    Count the root.
    """
    counts = []
    for key in ("fsdp1-full-pre-block-2-wide", "fsdp1-full-off-block-2-wide"):
        held: set[str] = set()
        most = 0
        for event in events_of(key)[0]:
            if event.kind == "AG":
                held.add(event.unit)
            elif event.kind == "FREE":
                held.discard(event.unit)
            most = max(most, len(held))
        counts.append(most)
    return (
        f"**{counts[0]}** with `BACKWARD_PRE`: the root, the block that computes, and the next block. "
        f"**{counts[1]}** without."
    )


def stops_of_the_limiter() -> str:
    """The GPU is slow: while the CPU runs through the forward of six units, no release has been completed yet. Before
    which all-gather does the CPU wait for the first time? And how many units have memory at that moment?
    """
    limiter = RateLimiter(enabled=True)
    stops: list[int] = []

    class Release:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            stops.append(number)

    for number in range(6):
        limiter.admit(f"block{number}")
        limiter.released(Release())
    return (
        f"Before the all-gather of **unit {stops[0]}**, counted from 0. Python has freed the earlier units, but the "
        f"GPU still reads them, so **{stops[0]}** units have memory. The CPU waits for the older of the "
        f"{limiter.num_in_flight} releases. From then on, it waits before every all-gather: "
        f"{', '.join(map(str, stops))}."
    )


def hybrid_slip() -> str:
    """The FSDP paper gives the bytes that leave a host, for each GPU: full replication 2M(W-1)/W, full sharding
    3M(W-1)/W, hybrid 2M(W-1)/(GW), with W GPUs, G of them on a host, and a model of M bytes. It also says to shard
    over F = W/G ranks to keep all-gathers inside one host. Compute all three for W=16, G=8, M=1. Then count the
    hybrid's bytes yourself. What are the two mistakes?
    """
    world, per_host = 16, 8
    replicated, sharded = 2 * (world - 1) / world, 3 * (world - 1) / world
    hosts = world // per_host
    paper, exact = hybrid_cross_host_as_printed(1, world, per_host), hybrid_cross_host(1, world, per_host)
    return (
        f"By the formulas: **{replicated:.4g}**, **{sharded:.4g}** and **{paper:.4g}**. Now count. A host has G "
        "GPUs, so for "
        "all-gathers to stay inside it the shard group must be F = **G**, not W/G. Then each rank stores M/G, and "
        "only that "
        f"shard is all-reduced, over the W/G = {hosts} hosts: 2 (M/G) (W/G - 1)/(W/G) = **{exact:.4g}**. The paper's "
        "factor "
        f"(W-1)/W belongs to a ring of all W ranks; the ring between hosts has only {hosts}."
    )


def strategy_bytes() -> str:
    """Count the bytes that one rank sends in a recorded step, in units of the model times (N-1)/N: for `FULL_SHARD`,
    `SHARD_GRAD_OP` and `NO_SHARD`.
    """
    lines = []
    for title, key in [("FULL_SHARD", "full"), ("SHARD_GRAD_OP", "zero2"), ("NO_SHARD", "none")]:
        run = f"fsdp1-{key}-pre-block-2-wide"
        model = sum(unit["bytes"] for unit in find(run)["units"])
        weight = {"AG": 1, "RS": 1, "AR": 2}
        sent = sum(weight.get(event.kind, 0) * event.num_bytes for event in events_of(run)[0]) / model
        lines.append(f"`{title}` **{sent:.3f}**")
    return (
        f"{', '.join(lines)}. An all-reduce counts twice, because it is a reduce-scatter and an all-gather. "
        "`FULL_SHARD` is slightly "
        "below 3, because the root is all-gathered only once."
    )


def small_updates() -> str:
    """A weight of 1.0 gets 100 updates of 0.001. What is its final value if it is stored in bfloat16, and if it is
    stored in float32?
    """
    narrow, wide = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
    for _ in range(100):
        narrow += 0.001
        wide += 0.001
    return (
        f"bfloat16: **{narrow.item():g}**. float32: **{wide.item():.4f}**. Near 1.0, the distance between bfloat16 "
        f"numbers is {torch.finfo(torch.bfloat16).eps:g}, so every update is lost by rounding. This is why shards stay "
        "in float32, and only the unsharded parameters have the low precision."
    )


def ragged() -> str:
    """Rank 0 has one sample with loss 4, rank 1 has three with loss 0. Each rank calls `loss.mean().backward()`. Which
    mean does FSDP's averaging compute, and which one would a single process compute?
    """
    first, second = torch.tensor([4.0]), torch.tensor([0.0, 0.0, 0.0])
    ranks = (first.mean() + second.mean()) / 2
    single = torch.cat([first, second]).mean()
    return (
        f"The mean of the means: **{ranks:g}**. One process: **{single:g}**. Averaging over ranks gives the only "
        "sample of rank 0 "
        "the weight of the three samples of rank 1. Fix: sum the losses, and multiply by (number of ranks) / (number "
        "of samples on all ranks)."
    )


def two_types() -> str:
    """A block of the step player's model widens from 64 to 128 and narrows again: 16 576 numbers in float32, biases
    included. Which tensors of it does the optimizer update on two ranks, with each API? How many bytes does a rank
    store?
    """
    flat = next(u for u in find("fsdp1-full-pre-block-2")["units"] if u["name"].endswith("block0"))
    each = next(u for u in find("fsdp2-full-pre-block-2")["units"] if u["name"].endswith("block0"))
    return (
        f"`FullyShardedDataParallel`: one flat parameter, **{flat['shard']:,} bytes** per rank. `fully_shard`: four "
        "DTensors, "
        f"two weights and two biases, **{each['shard']:,} bytes** together. All dimensions are even, so neither "
        "layout needs padding."
    )


def rank_0_saves() -> str:
    """Rank 0 of four saves the sharded state dict of a weight of shape (10, 4) with `torch.save`. Which part of the
    weight does the file contain?
    """
    shape = tuple(shard_shape(torch.Size((10, 4)), 0, 4, 0))
    return (
        f"Rows of shape **{shape}**, {shape[0]} of 10. The file looks complete, because it contains every name. Let "
        "every rank write "
        "its shard (`torch.distributed.checkpoint`), or call for the full state dict on all ranks and write it on one."
    )


EXERCISES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        zero_stage_3,
        sum_of_two,
        one_unit,
        five_rows,
        padding,
        root_padding,
        who_is_whole,
        first_gather_of_backward,
        two_by_two,
        overflow,
        post_order,
        alive,
        stops_of_the_limiter,
        hybrid_slip,
        strategy_bytes,
        small_updates,
        ragged,
        two_types,
        rank_0_saves,
    )
}
