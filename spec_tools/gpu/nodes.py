"""The kit on several machines: one program on each rank, and one report.

With torchrun, the same command on each machine; ``HOST`` is the name or address of one of them::

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id kit \\
        -m spec_tools.gpu.nodes

With SLURM, a file for ``sbatch``; the report is written on the first node::

    #!/bin/bash
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=1
    #SBATCH --gpus-per-node=8
    #SBATCH --time=00:45:00
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun --kill-on-bad-exit=0 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" -m spec_tools.gpu.nodes

The stages are ``hardware`` (a line for each rank), ``collectives``, ``smoke`` (both APIs, and both with replicas on the
nodes) and ``steps``. On each rank, a stage runs in a child process, so that a rank can fail without the end of the
program. The parents never use a device or a collective. They exchange results through torchrun's store::

    rank 0   parent   starts the child, waits, collects the results of all ranks, writes the report
             child    process group, collectives, training
    rank 2   parent   its child was ended by SIGSEGV: tells this to the other parents
             child    -
    rank 3   parent   ends its child, which waits for rank 2, after 5 seconds; its stacks are in the report

A child that is not ready within its limit writes the stacks of all threads and exits. The report names the rank that
the others wait for: the one that has passed the fewest steps. If a parent or its machine does not answer, rank 0 waits
for the limit of the stage, and names these ranks.

Spec: KIT-25.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.harness import worker
from spec_tests.waiting import comes_true
from spec_tools.gpu import chunks, report
from spec_tools.gpu.chunks import ROOT, Outcome
from spec_tools.gpu.merging import merge, names_of
from spec_tools.gpu.names import without_names
from spec_tools.gpu.node_stages import NODE_STAGES, NodeStage, Place
from spec_tools.gpu.platforms import PLATFORMS, Platform, find

__all__ = ["main"]

GRACE = 5.0  # seconds for a child after another rank has failed
PATIENCE = 5.0  # seconds for a child to write its stacks
MARGIN = 15.0  # seconds for parents to answer after all limits have passed
START_LIMIT = 120.0  # seconds until all parents have connected to the store


def main(stages: Sequence[NodeStage] = NODE_STAGES, arguments: Sequence[str] | None = None) -> int:
    """Runs the command on one rank; returns 0 if all stages have passed on all ranks, and 1 otherwise."""
    options = _options(arguments)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        print("Start this program with torchrun; see the first lines of spec_tools/gpu/nodes.py.", file=sys.stderr)
        return 2
    # torchrun ends the ranks of a machine with SIGTERM. The handler raises, so that the child is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    parent = Parent(Place(*(int(os.environ[name]) for name in names)), PLATFORMS[options.device], options)
    return parent.run([replace_limit(stage, options.limit) for stage in stages])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m spec_tools.gpu.nodes", description="the kit on several nodes"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the program itself")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for each stage (default: 180 to 1200)")
    parser.add_argument("--quick", action="store_true", help="training steps of the smallest model only")
    parser.add_argument("--with-names", action="store_true", help="keep names of hosts and users, and paths")
    default = ROOT / "build" / "gpu-report-nodes.md"
    parser.add_argument("--report", type=Path, metavar="FILE", default=default, help="where rank 0 writes it")
    return parser.parse_args(arguments)


def replace_limit(stage: NodeStage, limit: float | None) -> NodeStage:
    """The stage with this limit, if there is one."""
    return NodeStage(stage.name, stage.body, limit or stage.limit, stage.is_vital)


class Parent:
    """The program of a rank: it runs the stages in child processes. It uses no device and no collective.

    Args:
        place: where the rank is.
        platform: the platform; not checked here, because that could initialize CUDA before a fork.
        options: the options of the command.
    """

    def __init__(self, place: Place, platform: Platform, options: argparse.Namespace) -> None:
        self.place, self.platform, self.options = place, platform, options
        self.store = _connect()
        self.outcomes: dict[str, Outcome] = {}
        self.hosts: dict[int, str] = {}

    def run(self, stages: Sequence[NodeStage]) -> int:
        """Runs the stages; returns the exit status, which is the same on all ranks."""
        names, all_passed = [stage.name for stage in stages], True
        for stage in stages:
            try:
                self._answer(stage, self._stage(stage))
                if self.place.rank == 0:
                    # The limit may begin later on another rank.
                    self._collect(stage, names, stage.limit + MARGIN + GRACE + 2 * PATIENCE)
                passed = self._has_passed(stage)
            except SystemExit:
                self._was_ended(stage, names)
                raise
            all_passed = all_passed and passed
            if stage.is_vital and not passed:
                break
        self._leave()
        return 0 if all_passed else 1

    def _answer(self, stage: NodeStage, result: dict[str, Any]) -> None:
        self.store.set(f"{stage.name}/{self.place.rank}", json.dumps(result))

    def _was_ended(self, stage: NodeStage, names: Sequence[str]) -> None:
        """After SIGTERM: torchrun ends all ranks of a machine if one of them has ended. The other machines are
        notified."""
        self.store.set(f"{stage.name}/failed", str(self.place.rank))
        if not self.store.check([f"{stage.name}/{self.place.rank}"]):
            self._answer(stage, {**_result(0, "others", stage, "", []), "seconds": 0.0})
        # `_collect` sets this key last, after the report.
        if self.place.rank == 0 and not self.store.check([f"{stage.name}/passed"]):
            self._collect(stage, names, GRACE + PATIENCE + 2)  # torchrun sends SIGKILL after 30 seconds

    def _stage(self, stage: NodeStage) -> dict[str, Any]:
        """Runs one stage in a child; returns its result as JSON."""
        folder = Path(tempfile.mkdtemp(prefix="node-"))
        log, findings = folder / "log", folder / chunks.FINDINGS_FILE
        arguments = (stage, self.place, self.platform.name, self.options.quick, log, findings)
        # A fork, because the import of torch takes seconds. The parent has no threads and no CUDA.
        child = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
        begin = time.monotonic()
        child.start()
        try:
            cause = self._wait(child, stage, begin)
        finally:
            if child.is_alive():
                child.kill()
            child.join(PATIENCE)
        text = log.read_text(errors="replace") if log.exists() else ""
        result = _result(child.exitcode, cause, stage, text, chunks.read_findings(findings))
        shutil.rmtree(folder, ignore_errors=True)
        return {**result, "seconds": round(time.monotonic() - begin, 1)}

    def _wait(self, child: Any, stage: NodeStage, begin: float) -> str:
        """Waits for the child; returns why the parent has ended it, or nothing."""
        until, cause = begin + stage.limit + PATIENCE, "limit"
        while child.is_alive():
            if cause == "limit" and self.store.check([f"{stage.name}/failed"]):
                until, cause = min(until, time.monotonic() + GRACE), "others"
            if time.monotonic() > until:
                os.kill(child.pid, signal.SIGABRT)  # the fault handler writes the stacks
                child.join(PATIENCE)
                return cause
            child.join(0.1)
        if child.exitcode:
            self.store.set(f"{stage.name}/failed", str(self.place.rank))
        return ""

    def _collect(self, stage: NodeStage, names: Sequence[str], limit: float) -> None:
        """On rank 0: waits for the results of all ranks, prints them, and writes the report."""
        keys = {rank: f"{stage.name}/{rank}" for rank in range(self.place.num_ranks)}
        comes_true(lambda: self.store.check(list(keys.values())), limit)
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        outcome = merge(stage.name, found, self.place, stage.limit)
        self.outcomes[f"{stage.name}/{self.place.num_ranks}-ranks"] = outcome
        self.hosts |= {rank: line["host"] for rank, one in found.items() for line in one["findings"] if "host" in line}
        self._print(stage, outcome)
        planned = len(names) - len(self.outcomes)
        now = report.compose(self.platform, self.outcomes, names, planned, with_names=True)
        report.write(now if self.options.with_names else without_names(now, names_of(self.hosts)), self.options.report)
        self.store.set(f"{stage.name}/passed", str(int(outcome.word == "passed")))

    def _print(self, stage: NodeStage, outcome: Outcome) -> None:
        word = "ok" if outcome.word == "passed" else outcome.word.upper()
        for line in outcome.findings[0].get("ranks", []) if stage.name == "hardware" and outcome.findings else []:
            rank, where = line["rank"], f"{self.hosts[line['rank']]}:{line['local rank']}"
            print(f"[{where}] OK (rank {rank} of {self.place.num_ranks}), {line['device']}")
        print(f"  {word:8s}{outcome.seconds:7.1f} s  {stage.name}  {outcome.reason}", flush=True)

    def _has_passed(self, stage: NodeStage) -> bool:
        """Whether the stage has passed on all ranks, as rank 0 decides."""
        limit = 2 * stage.limit + 2 * MARGIN + 2 * GRACE
        if not comes_true(lambda: self.store.check([f"{stage.name}/passed"]), limit):
            raise TimeoutError(f"{self.place.name}: rank 0 has not answered within {limit:g} s")
        return bool(self.store.get(f"{stage.name}/passed") == b"1")

    def _leave(self) -> None:
        """Rank 0's machine has the store, so rank 0 waits a moment for the other ranks."""
        self.store.set(f"done/{self.place.rank}", "")
        if self.place.rank == 0:
            print(f"\nThe report is in {self.options.report}", flush=True)
            keys = [f"done/{rank}" for rank in range(self.place.num_ranks)]
            comes_true(lambda: self.store.check(keys), MARGIN)


def _connect() -> Any:
    """A connection to torchrun's store, with a prefix for each start of the ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=START_LIMIT)
    store = dist.TCPStore(address, port, int(os.environ["WORLD_SIZE"]), is_host, limit, wait_for_workers=False)
    return dist.PrefixStore(f"kit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _result(status: int | None, cause: str, stage: NodeStage, text: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The end of a child as JSON: word, reason, last lines, findings, and the marks that it has passed."""
    marks = [line["mark"] for line in found if "mark" in line]
    findings = [line for line in found if "mark" not in line]
    failed = [line["text"] for line in findings if line.get("outcome") == "failed"]
    if status == 0 and not cause:
        word, reason = ("failed", failed[0]) if failed else ("passed", "")
    elif cause == "others":
        word, reason = "stopped", "it waited for another rank"
    elif cause == "limit" or "Timeout (" in text:
        word, reason = "hung", f"did not end within {stage.limit:g} s"
    elif status is not None and status < 0:
        word, reason = "crashed", f"ended by {signal.Signals(-status).name}"
    else:
        word, reason = "failed", chunks.first_error(text)
    lines = "" if word == "passed" else "\n".join(text.splitlines()[-chunks.LAST_LINES :])
    return {"word": word, "reason": reason, "last_lines": lines, "findings": findings, "marks": marks}


# ---- in the child ---------------------------------------------------------------------------------------------------


def _child(stage: NodeStage, place: Place, device: str, quick: bool, log: Path, findings: Path) -> None:
    """Runs one stage. Its exit status is 0, or 1 after an exception, whose traceback is in the log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(stage.limit, exit=True)

    def leave(finding: dict[str, Any]) -> None:
        with findings.open("a") as file:
            file.write(json.dumps(finding) + "\n")

    with _group(stage, place, find(device)):
        for finding in stage.body(find(device), place, lambda text: leave({"mark": text}), quick):
            leave(finding)


@contextlib.contextmanager
def _group(stage: NodeStage, place: Place, platform: Platform) -> Iterator[None]:
    """The device and the default process group of this rank."""
    if platform.device_type == "cuda":
        worker.device_here = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(place.local_rank)
    limit = timedelta(seconds=stage.limit)
    store = dist.PrefixStore(f"group/{stage.name}", _connect())
    dist.init_process_group(
        platform.collectives, store=store, rank=place.rank, world_size=place.num_ranks, timeout=limit
    )
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
