"""Records small trainings on two and on four ranks for the pages, and writes them into the repository.

    python -m docs_build.recording.record

This takes a few minutes and needs a machine without other programs. Runs for pictures show time, so the fastest of many
steps is kept: other programs can only make a step slower. Steps in which the times of equal blocks differ by more than
`EVEN` are discarded; if no step is left, nothing is written::

    F 0   3.1 ms    F 1   2.9 ms    F 2   3.0 ms    F 3   3.2 ms        even
    F 0   2.7 ms    F 1   29. ms    F 2   2.9 ms    F 3   3.1 ms        another program was running

Runs for the step player record every *moment*, the start or end of an event, with the state of the rank and the running
functions of the package. They only show order. ``--player`` records only these runs, and works on any machine.

The runs of torch's own FSDPs stay as they are. The program that recorded them is in the history of the repository, as
``docs_build/recording/torchside.py`` of commit 2c8aa35e.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp.wrap
from docs_build.recording import arrivals, recordings
from docs_build.recording.models import Block, Net, Stage, batch
from docs_build.recording.records import of_all_ranks, stamp
from docs_build.recording.watching import WatchedUnit, Watcher
from minifsdp import FullyShardedDataParallel, trace
from minifsdp.engine.events import events
from minifsdp.fsdp2.fsdp_state import states_in

STRATEGIES = {
    "full": "FULL_SHARD",
    "zero2": "SHARD_GRAD_OP",
    "none": "NO_SHARD",
    "hybrid": "HYBRID_SHARD",
    "hybrid2": "_HYBRID_SHARD_ZERO2",
}
PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "off": None, "forward": "BACKWARD_PRE"}
EVEN = 2.0  # the largest ratio of the times of equal blocks
MOST_STEPS = 150  # the number of steps after which the recording gives up
ENOUGH_STEPS = 12
WATCHED_STEPS = 24
WRAPS: dict[str, type[nn.Module] | None] = {"block": Block, "stage": Stage, "whole": None}


@dataclass(frozen=True)
class Run:
    """One training to record.

    Attributes:
        api: ``"fsdp1"`` or ``"fsdp2"``.
        strategy: a key of `STRATEGIES`; ``"keep2"`` is ``reshard_after_forward=2`` of ``fully_shard``.
        prefetch: a key of `PREFETCH`; ``"ahead"`` is an explicit list of two units of ``fully_shard``.
        wrap: a key of `WRAPS`, the modules that become units.
        ranks: number of ranks.
        width: of the model.
        rows: batch size of one rank.
        extra: ``"nosync"`` accumulates over three batches, ``"bf16"`` computes and sends in bfloat16.
    """

    api: str
    strategy: str
    prefetch: str
    wrap: str
    ranks: int
    width: int = 64
    rows: int = 32
    extra: str = ""

    @property
    def key(self) -> str:
        """The name of the run in the records."""
        parts = [self.api, self.strategy, self.prefetch, self.wrap, str(self.ranks)]
        return "-".join([*parts, self.extra] if self.extra else parts) + ("-wide" if self.width > 64 else "")


def runs_of(ranks: int) -> list[Run]:
    """All runs with this many ranks: those of the step player, and wider ones for pictures."""
    return [*_player_runs(ranks), *_picture_runs(ranks)]


def _player_runs(ranks: int) -> Iterator[Run]:
    hybrids = ["hybrid", "hybrid2"] if ranks == 4 else []
    for strategy, prefetch, wrap in itertools.product(["full", "zero2", "none", *hybrids], PREFETCH, WRAPS):
        # Without all-gathers, or with a single unit, there is nothing to prefetch.
        if (strategy == "none" or wrap == "whole") and prefetch != "pre":
            continue
        # Four ranks are only needed for hybrids; two are enough to show prefetching.
        if ranks == 4 and prefetch != "pre" and (wrap == "stage" or strategy not in ("full", "hybrid")):
            continue
        yield Run("fsdp1", strategy, prefetch, wrap, ranks)
    fewer = [*hybrids, "keep2"] if ranks == 4 else []
    for strategy, prefetch, wrap in itertools.product(["full", "zero2", *fewer], ["pre", "ahead"], WRAPS):
        if prefetch == "pre" or wrap == "block":
            yield Run("fsdp2", strategy, prefetch, wrap, ranks)


def _picture_runs(ranks: int) -> Iterator[Run]:
    kinds = ["fsdp1 hybrid pre block"]
    if ranks == 2:
        kinds = [f"fsdp1 full {prefetch} block" for prefetch in PREFETCH]
        kinds += ["fsdp1 zero2 pre block", "fsdp1 none pre block", "fsdp1 full pre whole"]
        kinds += [f"fsdp1 full pre block {extra}" for extra in ("nosync", "bf16")]
        kinds += ["fsdp2 full pre block", "fsdp2 full ahead block"]
    for api, strategy, prefetch, wrap, *extra in map(str.split, kinds):
        yield Run(api, strategy, prefetch, wrap, ranks, 320, 320, *extra)


# --- building ---


def build(run: Run) -> nn.Module:
    """The sharded model of a run."""
    torch.manual_seed(0)
    mesh = _mesh(run.ranks, hybrid=True) if run.strategy.startswith("hybrid") else None
    return (_first_api if run.api == "fsdp1" else _second_api)(run, Net(run.width), mesh)


@cache
def _mesh(ranks: int, *, hybrid: bool) -> Any:
    """The mesh. It is cached, because connecting ranks takes longer than training them."""
    if hybrid:
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def _first_api(run: Run, model: nn.Module, mesh: Any) -> nn.Module:
    wrapped, prefetch, narrow = WRAPS[run.wrap], PREFETCH[run.prefetch], torch.bfloat16
    mixed = minifsdp.MixedPrecision(param_dtype=narrow, reduce_dtype=narrow) if run.extra == "bf16" else None
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=minifsdp.ShardingStrategy[STRATEGIES[run.strategy]],
        auto_wrap_policy=minifsdp.wrap.ModuleWrapPolicy({wrapped}) if wrapped else None,
        backward_prefetch=minifsdp.BackwardPrefetch[prefetch] if prefetch else None,
        forward_prefetch=run.prefetch == "forward",
        mixed_precision=mixed,
        device_id=torch.device("cpu"),
    )


def _second_api(run: Run, model: nn.Module, mesh: Any) -> nn.Module:
    mesh = mesh or _mesh(run.ranks, hybrid=False)
    reshard = {"zero2": False, "hybrid2": False, "keep2": 2}.get(run.strategy)
    wrapped = WRAPS[run.wrap]
    inner: list[Any] = [m for m in model.modules() if wrapped and isinstance(m, wrapped)]
    for module in inner:
        minifsdp.fully_shard(module, mesh=mesh, reshard_after_forward=True if reshard is None else reshard)
    minifsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if run.prefetch == "ahead":
        for place, module in enumerate(inner):
            module.set_modules_to_forward_prefetch(inner[place + 1 : place + 3])
            module.set_modules_to_backward_prefetch(inner[max(place - 2, 0) : place][::-1])
    return model


def units_of(model: nn.Module) -> list[Any]:
    """The units of a sharded model, the root's first."""
    if isinstance(model, FullyShardedDataParallel):
        wrappers = FullyShardedDataParallel.fsdp_modules(model)
        return [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
    return [state.unit for _, state in states_in(model) if state.unit is not None]


# --- recording ---


def _step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, watcher: Watcher | None) -> None:
    num = 3 if run.extra == "nosync" else 1
    optimizer.zero_grad()
    for micro in range(num):
        x = batch(run.rows, dist.get_rank(), 10 * step + micro)
        quiet: Callable[[], Any] = getattr(model, "no_sync", nullcontext) if micro < num - 1 else nullcontext
        with quiet():
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    note: Callable[..., Any] = watcher.note if watcher else lambda *_: None
    note("STEP", "", True)
    optimizer.step()
    note("STEP", "", False)


def perform(run: Run) -> dict[str, Any] | None:
    """Trains, records, and collects the recordings of all ranks on rank 0; the others get ``None``.

    Raises:
        RuntimeError: no step was even.
    """
    model = build(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(2):
        _step(run, model, optimizer, step, None)
    kept = _quickest_even(run, model, optimizer) if run.width > 64 else _watched(run, model, optimizer)
    all_ranks = of_all_ranks(kept)
    if dist.get_rank() != 0:
        return None
    layouts = [
        {"name": unit.name, "bytes": unit.num_bytes, "shard": unit.shard_bytes()}
        for unit in map(WatchedUnit, units_of(model))
    ]
    return {"run": asdict(run), "key": run.key, "units": layouts, "ranks": all_ranks}


def _watched(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Records one step for the player, with all observable state.

    It keeps the fastest of the steps with the most frequent order; slower ones mostly show waiting. The order sometimes
    differs, because gloo's thread releases its tensors a moment after it has reported a collective as done.
    """
    units = [WatchedUnit(unit) for unit in units_of(model)]
    steps: list[tuple[float, dict[str, Any]]] = []
    for step in range(2, 2 + WATCHED_STEPS):
        watcher = Watcher(units, optimizer)
        with watcher.watching():
            origin = _recorded(watcher, lambda step=step, watcher=watcher: _step(run, model, optimizer, step, watcher))
        (took,) = _largest(time.perf_counter() - origin)
        steps.append((took, _as_data(watcher, origin)))
    without_times = [str([(*moment[:3], *moment[4:]) for moment in data["moments"]]) for _, data in steps]
    # All ranks must keep the same step.
    went = list(zip(*of_all_ranks(without_times), strict=True))
    usual = max(went, key=went.count)
    _, kept = min((step for step, this in zip(steps, went, strict=True) if this == usual), key=itemgetter(0))
    return {**kept, "pieces": [unit.pieces() for unit in units]}


def _largest(*numbers: float) -> list[float]:
    """The maximum of each number over all ranks, because all ranks must keep the same step."""
    of_all = torch.tensor(numbers)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return of_all.tolist()


def _quickest_even(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Records a step for a picture. Observing all state takes time, so only the package's own recorder runs."""
    even: list[tuple[float, dict[str, Any]]] = []
    least = float("inf")
    for step in range(2, MOST_STEPS):
        recorder = trace.Recorder()
        with arrivals.noted(recorder):
            origin = _recorded(recorder, lambda step=step: _step(run, model, optimizer, step, None))
        took, uneven = _largest(time.perf_counter() - origin, unevenness(recorder.events))
        least = min(least, uneven)
        if uneven <= EVEN:
            even.append((took, _as_data(recorder, origin)))
        if len(even) >= ENOUGH_STEPS:
            break
    if not even:
        raise RuntimeError(f"{run.key}: of equal blocks one takes at least {least:.1f} times as long: a busy machine?")
    return min(even, key=itemgetter(0))[1]


def unevenness(events: list[trace.Event]) -> float:
    """The longest over the shortest forward of equal blocks, or backward if its ratio is greater."""
    found = ([e.end - e.start for e in events if e.kind == kind and "block" in e.unit] for kind in "FB")
    return max((max(lengths) / min(lengths) for lengths in found if lengths), default=1.0)


def _recorded(recorder: trace.Recorder, action: Callable[[], None]) -> float:
    """Runs the action with ``recorder`` installed; returns its start time, which is the same on all ranks."""
    dist.barrier()
    origin = time.perf_counter()
    events.recorder = recorder
    try:
        action()
    finally:
        events.recorder = None
    return origin


def _as_data(recorder: trace.Recorder, origin: float) -> dict[str, Any]:
    def since(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - origin, 7)

    events = [
        [e.kind, e.unit, since(e.start), since(e.end), e.num_bytes, e.ranks, str(e.dtype), e.stream, since(e.arrived)]
        for e in recorder.events
    ]
    noted = recorder.moments if isinstance(recorder, Watcher) else []
    moments = [[*m[:3], round(1e3 * (m[3] - origin), 4), *m[4:]] for m in noted]
    return {"events": events, "moments": moments}


def work(rank: int, ranks: int, store: str, out: str, only_player: bool) -> None:
    """All runs with this number of ranks, in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        found = [perform(run) for run in runs_of(ranks) if run.width <= 64 or not only_player]
        if rank == 0:
            Path(out).write_text(json.dumps(found))
        # A rank that leaves early closes connections on which the others may still be waiting.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Records all runs into one file."""
    parser = argparse.ArgumentParser(prog="python -m docs_build.recording.record")
    parser.add_argument("--player", action="store_true", help="do not renew the pictures, which need an idle machine")
    only_player = parser.parse_args().player
    # Loopback is enough, and also works without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    begun = time.monotonic()
    found: list[Any] = []
    facts = stamp()
    before = recordings.load()
    found += [run for run in before["runs"].values() if run["run"]["api"].startswith("torch")]
    if only_player:
        facts = {name: before[name] for name in facts}
        found += [run for run in before["runs"].values() if run["run"]["width"] > 64]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            part = f"{folder}/{ranks}.json"
            mp.spawn(work, (ranks, f"{folder}/store{ranks}", part, only_player), nprocs=ranks)
            found += json.loads(Path(part).read_text())
    recordings.write({**facts, "runs": found})
    print(f"{len(found)} runs in {time.monotonic() - begun:.0f} s, in {recordings.FILE.relative_to(recordings.ROOT)}")


if __name__ == "__main__":
    main()
