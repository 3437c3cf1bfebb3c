"""The first lines of a run: the versions, and one line for each rank that says whether its GPU works.

Each rank is a process of its own. It computes on its device, joins the process group, and sums a tensor over all ranks.
After each of these steps, it writes a line into its file, so that the kit knows which step failed or hangs::

    rank 0   started, computed, joined, summed          [host0:0] OK (rank 0 of 2), NVIDIA H100, NCCL 2.29, CUDA 13.0
    rank 1   started                                    [host0:1] BROKEN (rank 1 of 2): its device does not answer

A rank that has computed and then waits may work: another rank may be the broken one. The line says this. Only the
parent process prints, when all ranks are done or their limit has passed, so lines never interleave.

Spec: KIT-10.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.harness import pool, worker
from spec_tests.ports import free_port
from spec_tests.waiting import comes_true
from spec_tools.gpu.names import HOST
from spec_tools.gpu.platforms import Platform, find

__all__ = ["check_ranks", "line_of_versions", "note", "take_steps"]

LIMIT = 60.0
STACKS_LIMIT = 3.0
STEPS = ("started", "computed", "joined", "summed")
# The last work of a rank that has reached this step and not the next one.
WAITING = {
    "": "its process does not start",
    "started": "its device does not answer",
    "computed": "its device computes, but the process group does not start",
    "joined": "its device computes, but the first all-reduce does not end",
}
CAVEAT = "This does not prove that this GPU is broken: it looks the same if another GPU does not answer."
NO_CAVEAT = "No other rank takes part in this step."


def line_of_versions(versions: dict[str, str], architectures: Sequence[str]) -> str:
    """All versions in one line."""
    more = [f"built for {' '.join(architectures)}"] if architectures else []
    return ", ".join([*(f"{name} {version}" for name, version in versions.items()), *more])


def check_ranks(
    platform: Platform, num_ranks: int, limit: float = LIMIT, body: Callable[[worker.Seat, Path], None] | None = None
) -> dict[str, Any]:
    """Runs the steps on all ranks. Returns a finding with a line for each rank.

    Args:
        platform: where the ranks run.
        num_ranks: number of ranks, all of this machine.
        limit: seconds for all steps. Then the ranks are killed.
        body: what a rank does, if not `take_steps`. It writes with `note` into the file that it receives.
    """
    folder = Path(tempfile.mkdtemp(prefix="first-"))
    port = free_port()
    seats = [worker.Seat(rank, num_ranks, platform.name, folder, port) for rank in range(num_ranks)]
    processes = [
        pool.fork_server().Process(target=_rank, args=(seat, body or take_steps), daemon=True) for seat in seats
    ]
    try:
        for process in processes:
            process.start()
        all_ended = comes_true(lambda: _can_stop(processes), limit)
        stacks = {} if all_ended else _stacks(seats, processes)
        ranks = [_state_of(seat, process.exitcode) for seat, process in zip(seats, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    lines = [_line(rank, num_ranks, limit) for rank in ranks]
    finding = {"outcome": "passed", "ranks": ranks, "lines": lines}
    if all(rank["ok"] for rank in ranks):
        return finding
    # The last line of the text becomes the reason. The text of an error is more useful than that of a rank that only
    # waits.
    order = sorted(ranks, key=lambda rank: (bool(rank.get("error")), bool(rank["died"])))
    broken = [lines[rank["rank"]] for rank in order if not rank["ok"]]
    return finding | {"outcome": "failed", "text": "\n".join([*stacks.values(), *broken])}


def _can_stop(processes: Sequence[Any]) -> bool:
    """All ranks have ended; or one has failed, and the others had a grace period to end too."""
    codes = [process.exitcode for process in processes]
    if any(code not in (None, 0) for code in codes):
        comes_true(lambda: None not in [process.exitcode for process in processes], pool.GRACE)
        return True
    return None not in codes


def _state_of(seat: worker.Seat, status: int | None) -> dict[str, Any]:
    notes = [json.loads(line) for line in _file(seat).read_text().splitlines()] if _file(seat).exists() else []
    facts: dict[str, Any] = {}
    for one in notes:
        facts |= one
    step = facts.get("step", "")
    return {
        "host": HOST,
        "rank": seat.rank,
        "local_rank": seat.rank,
        "ok": step == STEPS[-1] and status == 0,
        **facts,
        "step": step,
        "died": signal.Signals(-status).name if status is not None and status < 0 else "",
    }


def _line(rank: dict[str, Any], num_ranks: int, limit: float) -> str:
    begin = f"[{rank['host']}:{rank['local_rank']}]"
    which = f"(rank {rank['rank']} of {num_ranks})"
    if rank["ok"]:
        return f"{begin} OK {which}, {rank['device']}, {rank['libraries']}"
    if rank.get("error"):
        reason = rank["error"]
    elif rank["died"]:
        reason = f"its process was ended by {rank['died']} after the step {rank['step'] or 'start'!r}"
    else:
        reason = f"{WAITING.get(rank['step'], 'it does not end')}; it waited up to {limit:g} s"
    alone = rank["step"] in ("", "started")
    return f"{begin} BROKEN {which}: {reason}. {NO_CAVEAT if alone else CAVEAT}"


def _stacks(seats: Sequence[worker.Seat], processes: Sequence[Any]) -> dict[int, str]:
    """The stacks of all threads of ranks that are still running."""
    running = [seat for seat, process in zip(seats, processes, strict=True) if process.is_alive()]
    for seat in running:
        if seat.stacks.exists():  # otherwise the handler of the signal does not exist yet
            os.kill(processes[seat.rank].pid, signal.SIGUSR1)
    comes_true(lambda: all(seat.stacks.exists() and seat.stacks.stat().st_size for seat in running), STACKS_LIMIT)
    return {
        seat.rank: f"--- rank {seat.rank}, its stacks ---\n{seat.stacks.read_text()}"
        for seat in running
        if seat.stacks.exists()
    }


# ---- in a rank ------------------------------------------------------------------------------------------------------


def _file(seat: worker.Seat) -> Path:
    return seat.folder / f"notes-{seat.rank}"


def note(path: Path, **facts: Any) -> None:
    """Writes facts of this rank into its file: a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _rank(seat: worker.Seat, body: Callable[[worker.Seat, Path], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=seat.stacks.open("w"), all_threads=True)
    path = _file(seat)
    try:
        body(seat, path)
    except BaseException as error:
        note(path, error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        os._exit(1)
    # Not sys.exit: destructors of torch can wait for ranks that have ended.
    os._exit(0)


def take_steps(seat: worker.Seat, path: Path) -> None:
    """The steps of a rank."""
    note(path, step="started")
    platform = find(seat.kind)
    device = worker.choose_device(seat)
    note(path, device=platform.device_name(device), libraries=platform.libraries(), **platform.memory(device))
    square = torch.ones(64, 64, device=device)
    found = float((square @ square).sum())
    if found != 64.0**3:
        raise ValueError(f"a matrix product on the device is wrong: its sum is {found}, not {64.0**3}")
    note(path, step="computed")
    worker.join_default_group(seat)
    note(path, step="joined")
    total = torch.full((1024,), float(seat.rank + 1), device=device)
    dist.all_reduce(total)
    expected = seat.num_ranks * (seat.num_ranks + 1) / 2
    if not bool((total == expected).all()):
        raise ValueError(f"wrong sum in the first all-reduce: element 0 is {float(total[0])}, not {expected}")
    note(path, step="summed")
