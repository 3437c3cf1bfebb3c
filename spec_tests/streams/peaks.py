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
import json
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from spec_tests import subject
from spec_tests.harness import device, pool
from spec_tests.harness.accounting import ROOT
from spec_tests.harness.simulated import WORLD
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api
from spec_tests.models.modules import MLP

__all__ = ["CASES", "KINDS", "RECORD", "Case", "network", "peaks"]

RECORD = ROOT / "docs" / "data" / "stream-peaks.json"
KINDS = {"flat": WRAPPED, "original": ORIGINALS, "fully_shard": FULLY_SHARD}


@dataclass(frozen=True)
class Case:
    """A training setting.

    Attributes:
        strategy: FSDP1's name of the strategy.
        precision: dtypes of parameters and reductions for mixed precision; ``None`` for none.
        offload: whether shards are stored on the CPU.
        micro_batches: number of micro-batches in a step; all but the last without synchronization.
    """

    strategy: str = "FULL_SHARD"
    precision: dict[str, torch.dtype] | None = None
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
    "bfloat16": Case(precision=BF16),
    "bfloat16, reduced in float32": Case(precision={**BF16, "reduce_dtype": torch.float32}),
    "offload": Case(offload=True),
    "bfloat16, offload": Case(precision=BF16, offload=True),
    "hybrid": Case(strategy="HYBRID_SHARD"),
    "bfloat16, hybrid": Case(strategy="HYBRID_SHARD", precision=BF16),
    "accumulation": Case(micro_batches=3),
    "bfloat16, accumulation": Case(precision=BF16, micro_batches=3),
}


class Single(nn.Linear):
    """A unit of one parameter."""


def network() -> nn.Module:
    """Units of four parameters and of one, without padding in either library, and a root with parameters."""
    blocks = [MLP(16, 32), MLP(16, 32), Single(16, 16, bias=False), MLP(16, 32), Single(16, 16, bias=False)]
    return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 16))


def peak(api: Api, case: Case) -> int:
    """Peak bytes of the third step."""
    memory = WORLD.memory
    gc.collect()
    memory.calm()
    before = memory.num_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = network() if case.offload else network().to(device())
        options: dict[str, Any] = {"precision": case.precision, "offload": case.offload}
        if case.offload and api.name == "fully_shard":
            # With pinned memory, which `Api` does not use.
            options["offload_policy"] = (torch_fsdp if api.is_torch else subject).CPUOffloadPolicy()
        strategy = subject.ShardingStrategy[case.strategy]
        model = api.shard(plain, unit_classes=(MLP, Single), strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        WORLD.synchronize()
        memory.calm()
        for number in range(case.micro_batches):
            is_last = number == case.micro_batches - 1
            with nullcontext() if is_last else api.no_sync(model):
                model(torch.randn(4, 16, device=device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return memory.peak - before


def peaks(kind: str, case: Case) -> tuple[int, int]:
    """The peaks of minifsdp and of torch."""
    api = KINDS[kind]
    return peak(api, case), peak(api.of_torch(), case)


def main() -> None:
    """Prints all cases, and records them with ``--record``."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.streams.peaks")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    pool.use_device("simulated")
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for num_ranks in (2, 4):
        dist.init_process_group("simulated", rank=0, world_size=num_ranks, store=FakeStore(), device_id=device())
        for name, case in CASES.items():
            if case.num_ranks == num_ranks:
                found[name] = {kind: peaks(kind, case) for kind in KINDS}
                print(f"{name:32}", found[name])
        dist.destroy_process_group()
    if asked.record:
        record = {"torch": torch.__version__, "peaks": {name: found[name] for name in CASES}}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
