"""Peak memory on the simulated accelerator, compared with torch's FSDP of the same kind.

The same small model trains with the same API of each library, on one rank; the others are fake ranks. The simulated
allocator counts every live block, including memory that ``record_stream`` holds back. The peak is that of a step after
the warm-up, including memory that stays allocated between steps::

    python -m spec_tests.streams.peaks

The command prints the peaks. ``--record`` also writes ``docs/data/stream-peaks.json``, the source of the table in
``docs/streams.md``. The peaks are the same on every machine, so a test compares the record with the current engine.

A *kind* is a front end with a kind of parameters: flat parameters, original parameters, or DTensors. `CASES` are the
training settings.

Spec: STREAM-17.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.harness import simulated
from spec_tests.models.modules import MLP

__all__ = ["CASES", "KINDS", "RECORD", "Case", "network", "peaks"]

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "stream-peaks.json"
SIM = "sim:0"
OURS, THEIRS = "minifsdp", "torch.distributed.fsdp"
KINDS = ("flat", "original", "fully_shard")


@dataclass(frozen=True)
class Case:
    """A training setting.

    Attributes:
        strategy: FSDP1's name of the strategy.
        low: dtypes of parameters and reductions for mixed precision; empty for none.
        offload: whether shards are stored on the CPU.
        micro_batches: number of micro-batches in a step; all but the last without synchronization.
    """

    strategy: str = "FULL_SHARD"
    low: dict[str, torch.dtype] = field(default_factory=dict)
    offload: bool = False
    micro_batches: int = 1

    @property
    def num_ranks(self) -> int:
        """Four for two replicas of two shards, else two."""
        return 4 if "HYBRID" in self.strategy else 2


BF16 = {"param_dtype": torch.bfloat16}
CASES = {
    "float32": Case(),
    "float32, kept": Case(strategy="SHARD_GRAD_OP"),
    "bfloat16": Case(low=BF16),
    "bfloat16, reduced in float32": Case(low={**BF16, "reduce_dtype": torch.float32}),
    "offload": Case(offload=True),
    "bfloat16, offload": Case(low=BF16, offload=True),
    "hybrid": Case(strategy="HYBRID_SHARD"),
    "bfloat16, hybrid": Case(strategy="HYBRID_SHARD", low=BF16),
    "accumulation": Case(micro_batches=3),
    "bfloat16, accumulation": Case(low=BF16, micro_batches=3),
}


class Single(nn.Linear):
    """A unit of one parameter."""


def network() -> nn.Module:
    """Units of four parameters and of one, without padding in either library, and a root with parameters."""
    blocks = [MLP(16, 32), MLP(16, 32), Single(16, 16, bias=False), MLP(16, 32), Single(16, 16, bias=False)]
    return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 16))


def trained(library: str, kind: str, case: Case) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """The sharded model, and a context in which backward does not reduce gradients."""
    words, model = importlib.import_module(library), network()
    if kind == "fully_shard":
        return _sharded(words, model, case)
    options: dict[str, Any] = {
        "auto_wrap_policy": importlib.import_module(f"{library}.wrap").ModuleWrapPolicy({MLP, Single}),
        "sharding_strategy": words.ShardingStrategy[case.strategy],
        "device_id": torch.device(SIM),
        "use_orig_params": kind == "original",
    }
    if case.low:
        options["mixed_precision"] = words.MixedPrecision(**case.low)
    if case.offload:
        options["cpu_offload"] = words.CPUOffload(offload_params=True)
    if case.num_ranks == 4:
        options["device_mesh"] = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    wrapped = words.FullyShardedDataParallel(model, **options)
    return wrapped, wrapped.no_sync


def _sharded(
    words: ModuleType, model: nn.Module, case: Case
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    options: dict[str, Any] = {"reshard_after_forward": case.strategy != "SHARD_GRAD_OP"}
    if case.low:
        options["mp_policy"] = words.MixedPrecisionPolicy(**case.low)
    if case.offload:
        options["offload_policy"] = words.CPUOffloadPolicy()
    else:
        model.to(SIM)
    if case.num_ranks == 4:
        options["mesh"] = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        options["mesh"] = init_device_mesh("sim", (2,))
    for module in model:
        if isinstance(module, MLP | Single):
            words.fully_shard(module, **options)
    return words.fully_shard(model, **options), nullcontext


def _step(model: nn.Module, no_sync: Callable[[], Any], optimizer: torch.optim.Optimizer, case: Case) -> None:
    for number in range(case.micro_batches):
        is_last = number == case.micro_batches - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        with nullcontext() if is_last else no_sync():
            model(torch.randn(4, 16, device=SIM)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(library: str, kind: str, case: Case) -> int:
    """Peak bytes of the third step."""
    memory = simulated.WORLD.memory
    gc.collect()
    memory.calm()
    before = memory.num_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, no_sync = trained(library, kind, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        torch.get_device_module("sim").synchronize()
        memory.calm()
        _step(model, no_sync, optimizer, case)
    return memory.peak - before


def peaks(kind: str, case: Case) -> tuple[int, int]:
    """The peaks of minifsdp and of torch."""
    found = []
    for library in (OURS, THEIRS):
        found.append(peak(library, kind, case))
    return found[0], found[1]


def main() -> None:
    """Prints all cases, and records them with ``--record``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(prog="python -m spec_tests.streams.peaks")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    device, store = simulated.install(), FakeStore()
    found: dict[str, dict[str, tuple[int, int]]] = {}
    print(f"{'':32}" + "".join(f"{kind:>26}" for kind in KINDS))
    for name, case in CASES.items():
        cells, found[name] = [], {}
        for kind in KINDS:
            dist.init_process_group("simulated", rank=0, world_size=case.num_ranks, store=store, device_id=device)
            simulated.WORLD.begin()
            ours, theirs = found[name][kind] = peaks(kind, case)
            cells.append(f"{ours:>8} {theirs:>8} {ours / theirs:>8.3f}")
            dist.destroy_process_group()
        print(f"{name:32}" + " ".join(cells))
    if asked.record:
        RECORD.write_text(json.dumps({"torch": torch.__version__, "peaks": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
