"""The cost of checks, always-on ones and those of ``minifsdp.debug()``: times of steps with and without the check.

    python -m spec_tools.benchmarks.debug_cost

The command prints a table. ``--record`` also writes ``docs/data/debug-cost.json``, the source of the table in
``docs/tools/debug.md``. Two ranks on gloo train the GPT of the benchmarks with each front end. A pair is a step with
the check and one without, in alternating order. The result is the median of the ratios::

    on / off   off / on   on / off     seconds .29 / .27   .28 / .30   .31 / .29     ratios 1.07  1.07  1.07

The table also has a 95 percent confidence interval of the median, which only depends on the order of the ratios: of 300
ratios, it is from the 133rd to the 168th. Always-on checks cost so little that this many are needed.

A step is measured in wall-clock time, and in CPU time of all threads of rank 0. CPU time hardly depends on the load of
the machine, but does not contain waiting. ``weights`` and ``meta`` run at the beginning, so their *start* is measured:
sharding the model and the first step. For ``meta``, the model is on the meta device and is materialized.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import minifsdp
from minifsdp.debugging import switch
from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.page import circumstances
from spec_tools.benchmarks.without_ledger import without_ledger
from spec_tools.benchmarks.workloads import WORKLOADS, Workload, adamw

__all__ = ["CHECKS", "APIS", "RECORD", "interval", "measure"]

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "debug-cost.json"
CPU = torch.device("cpu")
APIS = ("FullyShardedDataParallel", "fully_shard")
ALWAYS_ON = "ledger"
CHECKS: dict[str, tuple[str, ...]] = {ALWAYS_ON: (), **{name: (name,) for name in switch.CHECKS}, "all": ()}
AT_START = ("weights", "meta", "all")
CLOCKS = ("wall", "cpu")
NUM_RANKS = 2
NUM_WARM = 3
# Always-on checks cost so little that more pairs are needed.
TIMES_MORE = 20


def measure(workload: Workload, *, steps: int, starts: int) -> dict[str, Any]:
    """Measures all checks. Every rank must call it.

    Args:
        workload: the training workload.
        steps: pairs of steps for each check and front end.
        starts: pairs of starts.

    Returns:
        For each front end, ``step_ms`` and ``start_ms``: median wall-clock times with all checks off. ``step`` and
        ``start`` contain the ratios of both `CLOCKS` by check.
    """
    with warnings.catch_warnings():
        # `weights` and `meta` warn if the model has been trained already.
        warnings.simplefilter("ignore")
        return {api: _of_api(api, workload, steps, starts) for api in APIS}


def _of_api(api: str, workload: Workload, steps: int, starts: int) -> dict[str, Any]:
    step = _stepper(_taken(api, workload, is_meta=False), workload)
    with minifsdp.debug("order"):
        for _ in range(NUM_WARM):
            step()

    def start_of(name: str) -> Callable[[], Any]:
        return lambda: _stepper(_taken(api, workload, is_meta=name == "meta"), workload)()

    found: dict[str, Any] = {}
    found["step"], found["step_ms"] = _ratios(lambda name: step, tuple(CHECKS), steps, repeats=True)
    found["start"], found["start_ms"] = _ratios(start_of, AT_START, starts, repeats=False)
    return found


def _ratios(
    action_of: Callable[[str], Callable[[], Any]], names: tuple[str, ...], pairs: int, *, repeats: bool
) -> tuple[dict[str, dict[str, Any]], float]:
    """The median of on / off and its `interval`, by check and clock; and the median of off in milliseconds."""
    ratios: dict[str, dict[str, Any]] = {}
    plain: list[float] = []
    for name in names:
        numbers = range(pairs * TIMES_MORE if name == ALWAYS_ON else pairs)
        found = [_pair(action_of(name), name, number % 2 == 0, repeats) for number in numbers]
        plain += [off[0] for _, off in found]
        ratios[name] = {}
        for index, clock in enumerate(CLOCKS):
            of_clock = [on[index] / off[index] for on, off in found]
            ratios[name][clock] = round(statistics.median(of_clock), 3)
            ratios[name][f"{clock}_interval"] = [round(end, 4) for end in interval(of_clock)]
    return ratios, round(1000 * statistics.median(plain), 1)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 percent confidence interval of the median, for any distribution; for few values, their whole range."""
    ordered = sorted(values)
    # The number of values below the median has the distribution of heads in that many coin tosses.
    number = len(ordered)
    outside = max(0, math.floor(number / 2 - 0.98 * math.sqrt(number)))
    return ordered[max(0, outside - 1)], ordered[number - max(1, outside)]


def _pair(action: Callable[[], Any], name: str, on_first: bool, repeats: bool) -> tuple[tuple[float, float], ...]:
    """Seconds of both clocks, on and off. With ``repeats``, of the second call, because some checks start in the
    first."""
    found = {}
    for is_on in (on_first, not on_first):
        with _with(name) if is_on else _without(name):
            if repeats:
                action()
            found[is_on] = _seconds(action)
    return found[True], found[False]


def _with(name: str) -> Any:
    return nullcontext() if name == ALWAYS_ON else minifsdp.debug(*CHECKS[name])


def _without(name: str) -> Any:
    return without_ledger() if name == ALWAYS_ON else nullcontext()


def _seconds(action: Callable[[], Any]) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    reported = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    return reported


def _stepper(model: nn.Module, workload: Workload) -> Callable[[], None]:
    (inputs, targets), *_ = workload.batches(0, dist.get_rank())
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _taken(api: str, workload: Workload, *, is_meta: bool) -> nn.Module:
    """The sharded model. A meta-device model is materialized, with the same values on all ranks."""
    with torch.device("meta") if is_meta else nullcontext():
        model = workload.model()
    if api == "fully_shard":
        sharded: nn.Module = wrap_units(model, (workload.unit_class,), minifsdp.fully_shard)
        return sharded.to_empty(device=CPU).apply(_set) if is_meta else sharded
    options: dict[str, Any] = {"param_init_fn": _make_real if is_meta else None, "device_id": CPU}
    wrapped: nn.Module = wrap_units(
        model, (workload.unit_class,), lambda unit: minifsdp.FullyShardedDataParallel(unit, **options)
    )
    return wrapped


def _make_real(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    _set(module)


def _set(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            getattr(tensor, "_local_tensor", tensor).fill_(0.02)


def table(found: dict[str, Any]) -> list[str]:
    """A table for the terminal, with a row for each front end and check."""
    lines = [f"{'':36}" + "".join(f"{what:>10} {clock}" for what in ("step", "start") for clock in CLOCKS)]
    for api, measured in found.items():
        for name in CHECKS:
            ratios = [measured[what].get(name, {}).get(clock) for what in ("step", "start") for clock in CLOCKS]
            cells = [f"{'-' if ratio is None else format(ratio, '.3f'):>14}" for ratio in ratios]
            lines.append(f"{api:26}{name:10}" + "".join(cells))
        lines.append(f"{api:26}off: a step {measured['step_ms']} ms, a start {measured['start_ms']} ms")
    return lines


def _rank(rank: int, folder: str, workload: str, steps: int, starts: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    found = measure(WORKLOADS[workload], steps=steps, starts=starts)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.benchmarks.debug_cost")
    parser.add_argument("--workload", default="gpt", choices=[n for n, w in WORKLOADS.items() if w.num_ranks == 2])
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps")
    parser.add_argument("--starts", type=int, default=5, help="pairs of starts")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="debug-cost-") as folder:
        mp.spawn(_rank, (folder, asked.workload, asked.steps, asked.starts), nprocs=NUM_RANKS)
        found = json.loads(Path(folder, "found.json").read_text())
    print("\n".join(table(found)))
    if asked.record:
        reported = circumstances(time.monotonic() - begin)
        what = {
            "date": str(datetime.now(UTC).date()),
            "circumstances": reported,
            "model": WORKLOADS[asked.workload].about,
        }
        pairs = {"steps": asked.steps, "starts": asked.starts}
        RECORD.write_text(json.dumps({**what, **pairs, "apis": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
