"""Records small trainings on two and on four ranks for the pages, and writes them into the repository.

    python -m docs_build.recording.record

This takes a few minutes and needs a machine without other programs. The recording has the settings
of each run; to add a run, add its key and its settings there. Runs for pictures show time, so the fastest of many steps
is kept: other programs can only make a step slower. Steps in which the times of equal blocks differ by more than `EVEN`
are discarded; if no step is left, nothing is written::

    F 0   3.1 ms    F 1   2.9 ms    F 2   3.0 ms    F 3   3.2 ms        even
    F 0   2.7 ms    F 1   29. ms    F 2   2.9 ms    F 3   3.1 ms        another program was running

Runs for the step player record every *moment*, the start or end of an event, with the state of the rank and the running
functions of the package. They only show order. ``--player`` records only these runs, and works on any machine.

Each run has these settings:

============  =====================================================================================
``api``       ``fsdp1`` or ``fsdp2``
``strategy``  a key of `STRATEGIES`; ``keep2`` is ``reshard_after_forward=2`` of ``fully_shard``
``prefetch``  a key of `PREFETCH`; ``ahead`` is an explicit list of two units of ``fully_shard``
``wrap``      a key of `WRAPS`, the modules that become units
``ranks``     number of ranks
``width``     of the model; more than 64 in pictures
``rows``      batch size of one rank
``extra``     ``nosync`` accumulates over three batches, ``bf16`` computes and sends in bfloat16
============  =====================================================================================

The runs of torch's own FSDPs stay as they are. The program that recorded them is in the history of the repository, as
``docs_build/recording/torchside.py`` of commit 2c8aa35e.
"""

import argparse
import gzip
import json
import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
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
WRAPS: dict[str, type[nn.Module] | None] = {"block": Block, "stage": Stage, "whole": None}
EVEN = 2.0  # the largest ratio of the times of equal blocks
PICTURE_STEPS = 60
WATCHED_STEPS = 24


def is_picture(run: Any) -> bool:
    """Whether a run is for pictures."""
    return bool(run.width > 64)


# --- building ---


def build(run: Any) -> nn.Module:
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


def _first_api(run: Any, model: nn.Module, mesh: Any) -> nn.Module:
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


def _second_api(run: Any, model: nn.Module, mesh: Any) -> nn.Module:
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


def _step(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, recorder: Any = None) -> None:
    num = 3 if run.extra == "nosync" else 1
    optimizer.zero_grad()
    for micro in range(num):
        x = batch(run.rows, dist.get_rank(), 10 * step + micro)
        with model.no_sync() if micro < num - 1 else nullcontext():  # type: ignore[operator]
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    note = getattr(recorder, "note", lambda *_: None)
    note("STEP", "", True)
    optimizer.step()
    note("STEP", "", False)


def perform(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Trains and records an entry of the recording again. Rank 0 collects all ranks; the others get ``None``.

    Raises:
        RuntimeError: no step was even.
    """
    run = SimpleNamespace(**entry["run"])
    model = build(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(2):
        _step(run, model, optimizer, step)
    units = [WatchedUnit(unit) for unit in units_of(model)]
    steps = [
        _recorded(run, model, optimizer, step, units)
        for step in range(2, 2 + (PICTURE_STEPS if is_picture(run) else WATCHED_STEPS))
    ]
    kept = min((_even if is_picture(run) else _usual)(steps), key=itemgetter(0))[2]
    all_ranks = of_all_ranks(kept if is_picture(run) else {**kept, "pieces": [unit.pieces() for unit in units]})
    if dist.get_rank() != 0:
        return None
    layouts = [{"name": unit.name, "bytes": unit.num_bytes, "shard": unit.shard_bytes()} for unit in units]
    return {"run": entry["run"], "key": entry["key"], "units": layouts, "ranks": all_ranks}


# Seconds and unevenness, both the largest of all ranks, and this rank's data.
Step = tuple[float, float, dict[str, Any]]


def _recorded(
    run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, units: list[WatchedUnit]
) -> Step:
    """Records one step. Observing all state takes time, so only the package's own recorder records a picture."""
    recorder = trace.Recorder() if is_picture(run) else Watcher(units, optimizer)
    observing: AbstractContextManager[None] = (
        recorder.watching() if isinstance(recorder, Watcher) else arrivals.noted(recorder)
    )
    with observing:
        dist.barrier()
        origin = time.perf_counter()
        events.recorder = recorder
        _step(run, model, optimizer, step, recorder)
        events.recorder = None
    # All ranks must keep the same step.
    of_all = torch.tensor([time.perf_counter() - origin, unevenness(recorder.events)])
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    took, uneven = of_all.tolist()
    return took, uneven, _as_data(recorder, origin)


def _even(steps: list[Step]) -> list[Step]:
    """The steps in which equal blocks take about the same time."""
    even = [step for step in steps if step[1] <= EVEN]
    if not even:
        least = min(uneven for _, uneven, _ in steps)
        raise RuntimeError(f"of equal blocks one takes at least {least:.1f} times as long: a busy machine?")
    return even


def _usual(steps: list[Step]) -> list[Step]:
    """The steps with the most frequent order on all ranks.

    The order sometimes differs, because gloo's thread releases its tensors a moment after it has reported a collective
    as done.
    """
    without_times = [str([(*moment[:3], *moment[4:]) for moment in data["moments"]]) for *_, data in steps]
    went = list(zip(*of_all_ranks(without_times), strict=True))
    usual = max(went, key=went.count)
    return [step for step, this in zip(steps, went, strict=True) if this == usual]


def unevenness(events: list[trace.Event]) -> float:
    """The longest over the shortest forward of equal blocks, or backward if its ratio is greater."""
    found = ([e.end - e.start for e in events if e.kind == kind and "block" in e.unit] for kind in "FB")
    return max((max(lengths) / min(lengths) for lengths in found if lengths), default=1.0)


def _as_data(recorder: trace.Recorder, origin: float) -> dict[str, Any]:
    def since(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - origin, 7)

    events = [
        [e.kind, e.unit, since(e.start), since(e.end), e.num_bytes, e.ranks, str(e.dtype), e.stream, since(e.arrived)]
        for e in recorder.events
    ]
    moments = [[*m[:3], round(1e3 * (m[3] - origin), 4), *m[4:]] for m in getattr(recorder, "moments", [])]
    return {"events": events, "moments": moments}


def work(rank: int, ranks: int, store: str, out: str, entries: list[dict[str, Any]]) -> None:
    """All runs with this number of ranks, in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [perform(entry) for entry in entries]
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    # A rank that leaves early closes connections on which the others may still be waiting.
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Records all runs into one file."""
    parser = argparse.ArgumentParser(prog="python -m docs_build.recording.record")
    parser.add_argument("--player", action="store_true", help="do not renew the pictures, which need an idle machine")
    only_player = parser.parse_args().player
    # Loopback is enough, and also works without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    before = recordings.load()
    entries = [{"key": key, "run": entry["run"]} for key, entry in before["runs"].items()]
    runs = dict(before["runs"])
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            part = f"{folder}/{ranks}.json"
            chosen = [
                entry
                for entry in entries
                if entry["run"]["ranks"] == ranks
                and not entry["run"]["api"].startswith("torch")
                and not (only_player and is_picture(SimpleNamespace(**entry["run"])))
            ]
            mp.spawn(work, (ranks, f"{folder}/store{ranks}", part, chosen), nprocs=ranks)
            runs |= {entry["key"]: entry for entry in json.loads(Path(part).read_text())}
    data = {**before, **({} if only_player else stamp()), "runs": list(runs.values())}
    # The same data results in the same bytes.
    recordings.FILE.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
