"""When is a unit all-gathered? Prefetch, overlap and the rate limiter, shown on a timeline.

    torchrun --standalone --nproc-per-node 2 tutorials/overlap.py --folder /tmp

Output: the order of all-gathers and reductions under each setting, and a timeline of each.

It takes some seconds on two CPU cores. It draws each variant as an SVG picture into the folder. All pictures use the
same time axis. Each shows the fastest of several steps, because other programs can only make a step slower.

All variants compute the same numbers. They issue collectives *at different times*. If an all-gather is issued only when
its unit needs it, all ranks wait for it. If it is issued earlier, it runs while another unit computes, but its output
also occupies memory earlier. In the orders below, ``B`` is the start of a unit's backward, ``AG`` the issue of an
all-gather, ``FREE`` the release of its memory, and ``RS`` the issue of the reduction of its gradient. The four blocks
are 0 to 3, and backward runs from 3 to 0.

1. **No backward prefetch**: ``B3 AG3 FREE3 RS3 B2 AG2``. One unit is unsharded at a time, and the ranks wait for each
   all-gather.
2. **BACKWARD_POST**: ``B3 AG3 FREE3 AG2 RS3 B2``. One unit is unsharded at a time. The next all-gather runs at the same
   time as the reduction.
3. **BACKWARD_PRE**, the default: ``B3 AG3 AG2 FREE3 RS3 B2 AG1``. The next all-gather runs while the gradients of this
   unit are computed, so it overlaps the most. Two units are unsharded at the same time.
4. **Forward prefetch** does the same in forward: ``AG0 AG1 F0 FREE0 AG2 F1``. It works from the second iteration on,
   because the first iteration records the order. It helps if the CPU issues work late. If the GPU has a queue of work,
   the next all-gather starts early anyway.
5. **The rate limiter** has the opposite purpose. A CPU runs far ahead of its GPU. It could issue the all-gathers of ten
   units before the GPU has computed the first one, and then ten units would be in memory. So before it issues a third
   all-gather, the CPU waits until the oldest unit is freed. In this script, a clock simulates the GPU.

The *hidden* time is the part of each all-gather, between issue and wait, during which another unit computed. On two CPU
cores, communication and computation use the same cores, so overlap saves no time. On GPUs, hidden time makes the step
shorter.

Spec: PREF-02, PREF-04, PREF-06, PREF-07, PREF-12, PREF-16, LIM-02, LIM-03, LIM-07.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from common import Block, Place, from_all_ranks, on_first_rank, on_ranks, say
from torch import Tensor, nn

from minifsdp import BackwardPrefetch, trace
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.trace import Event, Recorder
from minifsdp.wrap import ModuleWrapPolicy
from minifsdp_tools import timeline

NUM_BLOCKS, WIDTH, NUM_STEPS = 4, 256, 8


def step(model: nn.Module, place: Place) -> float:
    generator = torch.Generator().manual_seed(place.rank)
    x = torch.randn(512, WIDTH, generator=generator).to(place.device)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


@dataclass
class Seen:
    """One step: its loss, the events of each rank with their time origin, and the resulting gradient."""

    loss: float
    recorder: Recorder
    all_ranks: list[tuple[float, list[Event]]]
    gradient: Tensor

    @property
    def seconds(self) -> float:
        """The duration, the same number on every rank."""
        return max(event.end - origin for origin, events in self.all_ranks for event in events)


def watch_step(model: nn.Module, place: Place) -> Seen:
    # All ranks leave a barrier at nearly the same time, so it serves as the common time origin.
    dist.barrier()
    origin = time.perf_counter()
    with trace.record() as recorder:
        loss = step(model, place)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return Seen(loss, recorder, from_all_ranks((origin, recorder.events)), gradient)


def watch(place: Place, **options: object) -> Seen:
    """The fastest of several steps. The first step only records the order. Every rank must call it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)]).to(place.device)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place.device, **options)
    step(model, place)
    return min((watch_step(model, place) for _ in range(NUM_STEPS)), key=lambda seen: seen.seconds)


def order_of(recorder: Recorder, *kinds: str) -> list[str]:
    """Events such as ``AG3``, in order of issue."""
    return [word.replace(" ", "") for word in recorder.order(*kinds)]


def backward_of(recorder: Recorder) -> list[str]:
    words = order_of(recorder, "AG", "B", "FREE", "RS")
    return words[words.index(f"B{NUM_BLOCKS - 1}") :]


def hidden_seconds(events: list[Event]) -> float:
    """The time during which all-gathers ran while another unit computed."""
    computing = [event for event in events if event.kind in "FB"]
    return sum(
        max(0.0, min(gather.end, compute.end) - max(gather.start, compute.start))
        for gather in events
        if gather.kind == "AG"
        for compute in computing
        if compute.unit != gather.unit
    )


def draw(pictures: dict[str, Seen], folder: Path) -> None:
    """Draws all pictures with the same time axis, so that you can compare them."""
    seconds = max(seen.seconds for seen in pictures.values())
    for name, seen in pictures.items():
        origins, events = zip(*seen.all_ranks, strict=True)
        picture = timeline.svg(events, origins=origins, title=name.replace("-", " "), seconds=seconds)
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


def lesson_backward(place: Place) -> dict[str, Seen]:
    variants = {"none": None, "post": BackwardPrefetch.BACKWARD_POST, "pre": BackwardPrefetch.BACKWARD_PRE}
    seen = {name: watch(place, backward_prefetch=choice) for name, choice in variants.items()}
    block = next(event.num_bytes for event in seen["pre"].recorder.events if event.kind == "AG")
    for name, one in seen.items():
        events = one.recorder.events
        say(place, f"backward prefetch {name:<5} {' '.join(backward_of(one.recorder)[:9])} ...")
        say(place, f"    peak unsharded {timeline.peak_gathered_bytes(events):,} bytes")
        say(place, f"    all-gather time hidden behind computation {1000 * hidden_seconds(events):.2f} ms")

    orders = {name: backward_of(one.recorder)[:6] for name, one in seen.items()}
    assert orders["none"] == ["B3", "AG3", "FREE3", "RS3", "B2", "AG2"]
    assert orders["post"] == ["B3", "AG3", "FREE3", "AG2", "RS3", "B2"]
    assert orders["pre"] == ["B3", "AG3", "AG2", "FREE3", "RS3", "B2"]
    peaks = {name: timeline.peak_gathered_bytes(one.recorder.events) for name, one in seen.items()}
    assert peaks == {"none": block, "post": block, "pre": 2 * block}
    assert hidden_seconds(seen["none"].recorder.events) == 0.0 < hidden_seconds(seen["pre"].recorder.events)
    assert len({one.loss for one in seen.values()}) == 1
    assert all(torch.equal(one.gradient, seen["none"].gradient) for one in seen.values())
    return {f"backward-prefetch-{name}": one for name, one in seen.items()}


def lesson_forward(place: Place) -> dict[str, Seen]:
    seen = watch(place, forward_prefetch=True)
    forward = order_of(seen.recorder, "AG", "F", "FREE")[:6]
    say(place, f"forward prefetch        {' '.join(forward)} ...")
    assert forward == ["AG0", "AG1", "F0", "FREE0", "AG2", "F1"]
    return {"forward-prefetch": seen}


class Clock:
    """The time of a simulated machine, in ticks of the CPU."""

    def __init__(self) -> None:
        self.now = 0


@dataclass
class Release:
    """The time at which a simulated GPU is done with a unit. It has the interface of a CUDA event."""

    clock: Clock
    time: int

    def query(self) -> bool:
        """Whether the GPU is done."""
        return self.clock.now >= self.time

    def synchronize(self) -> None:
        """Blocks the CPU until the GPU is done."""
        self.clock.now = max(self.clock.now, self.time)


def simulate(*, limited: bool, num_units: int = 10, seconds_of_gpu: int = 20) -> tuple[int, int]:
    """Simulates a forward. The GPU needs 20 times as long to compute a unit as the CPU needs to issue it.

    Returns:
        The largest number of units in memory at the same time, and how long the CPU was busy or waiting.
    """
    clock, limiter, releases, most = Clock(), RateLimiter(limited), [], 0
    for number in range(num_units):
        limiter.throttle(str(number))
        clock.now += 1
        releases.append(Release(clock, seconds_of_gpu * (number + 1)))
        most = max(most, sum(not release.query() for release in releases))
        limiter.released(releases[-1])
    return most, clock.now


def lesson_limiter(place: Place) -> None:
    (most, busy), (most_without, busy_without) = simulate(limited=True), simulate(limited=False)
    say(
        place,
        f"a fast CPU and a slow GPU, 10 units: at most {most_without} in memory, issued after {busy_without} ticks",
    )
    say(place, f"with the rate limiter:               at most {most} in memory, issued after {busy}; the GPU takes 200")
    assert (most_without, busy_without) == (10, 10)
    assert most == 2
    assert busy < 200, "the limiter never makes the GPU idle"
    # On the CPU, memory is freed immediately, so the limiter never waits. Both settings give the same numbers.
    limited, free = (watch(place, limit_all_gathers=choice) for choice in (True, False))
    assert limited.loss == free.loss
    assert free.recorder.count("WAIT") == 0


def lesson(options: argparse.Namespace, place: Place) -> None:
    folder = options.folder or Path(on_first_rank(tempfile.mkdtemp))
    pictures = lesson_backward(place) | lesson_forward(place)
    lesson_limiter(place)
    if place.speaks:
        draw(pictures, folder)
    say(place, f"pictures: {', '.join(sorted(path.name for path in folder.glob('*-prefetch*.svg')))} in {folder}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefetch, overlap and the rate limiter, seen on a timeline.")
    parser.add_argument("--folder", type=Path, help="where to draw the pictures, default: a temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))
