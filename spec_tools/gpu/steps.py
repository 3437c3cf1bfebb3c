"""Training steps of minifsdp and of torch's FSDPs, one after the other on the same ranks: time, memory, host work.

The model is the tutorials' GPT at the sizes of GPT-2, in bfloat16 with float32 optimizer states. All contenders start
from the same weights and train on the same batches, so their losses must agree. If one does not, the chunk fails.
Times are reported and never make a chunk fail.

For each contender:

* ``ms``: median time of a step, in which the host waits only at the end of each group of `STEPS_IN_A_GROUP` steps;
* ``host ms``: the time in which the host issues such a step. If it is close to ``ms``, the host limits the step;
* ``tokens/s``: tokens of one rank per second;
* ``TFLOP/s``: six operations per parameter and token, plus attention; of one rank;
* ``peak GiB``: the most memory that tensors of this contender used during a step;
* ``syncs``, ``mallocs``, ``launches``: calls of CUDA's runtime in one step, counted by the profiler.

The contenders take turns for `NUM_TURNS` turns, because clocks and temperatures change. With several ranks on one GPU,
no time has a meaning.

Spec: KIT-09.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import minifsdp
from spec_tests.harness import device, pool
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform, find
from spec_tools.gpu.smoke import own_device
from tutorials.gpt.model import GPT, VOCABULARY, Block

__all__ = ["CONTENDERS", "SIZES", "Size", "train", "work"]

NUM_TURNS, NUM_GROUPS, STEPS_IN_A_GROUP, NUM_WARM = 2, 3, 5, 3
TOLERANCE = 2e-2  # of a loss: bfloat16, and sums in another order

Size = dict[str, int]
SIZES: dict[str, Size] = {
    "tiny": {"width": 32, "num_blocks": 2, "num_heads": 2, "length": 16, "batch": 2},
    "125M": {"width": 768, "num_blocks": 12, "num_heads": 12, "length": 1024, "batch": 8},
    "350M": {"width": 1024, "num_blocks": 24, "num_heads": 16, "length": 1024, "batch": 8},
    "1.3B": {"width": 2048, "num_blocks": 24, "num_heads": 16, "length": 1024, "batch": 4},
}


def work(platform: Platform, num_ranks: int, size: str, hang_limit: float) -> Iterator[dict[str, Any]]:
    """Yields one finding for each contender: the measurements of rank 0."""
    about = {"size": size, "ranks": num_ranks}
    try:
        measured = on_ranks(platform, num_ranks, measure, hang_limit, name=platform.name, size=size)[0]
    except pool.Failure as failure:
        yield {**about, "outcome": "failed", "text": f"{size} on {num_ranks} ranks:\n{failure}"}
        return
    expected = next(iter(measured.values()))["losses"]
    for contender, figures in measured.items():
        finding = {**about, "contender": contender, **figures}
        pairs = zip(figures["losses"], expected, strict=True)
        if any(abs(mine - right) > TOLERANCE * abs(right) for mine, right in pairs):
            text = f"{size}, {contender}: losses {figures['losses']}, expected {expected}"
            yield {**finding, "outcome": "failed", "text": text}
        else:
            yield {**finding, "outcome": "passed"}


# ---- contenders -----------------------------------------------------------------------------------------------------


def _of_fsdp1(package: Any) -> Callable[[GPT], nn.Module]:
    """The wrapper of minifsdp or torch."""

    def build(model: GPT) -> nn.Module:
        precision = package.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = torch_fsdp.wrap.ModuleWrapPolicy({Block})
        # torch needs a device for its FSDP1, the CPU too.
        where = own_device() or device()
        wrapped: nn.Module = package.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=True, device_id=where
        )
        return wrapped

    return build


def _of_fsdp2(package: Any) -> Callable[[GPT], nn.Module]:
    """``fully_shard`` of minifsdp or torch."""

    def build(model: GPT) -> nn.Module:
        policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
        for block in model.blocks:
            package.fully_shard(block, mesh=mesh, mp_policy=policy)
        sharded: nn.Module = package.fully_shard(model, mesh=mesh, mp_policy=policy)
        return sharded

    return build


CONTENDERS: dict[str, Callable[[GPT], nn.Module]] = {
    "torch FullyShardedDataParallel": _of_fsdp1(torch_fsdp),
    "minifsdp FullyShardedDataParallel": _of_fsdp1(minifsdp),
    "torch fully_shard": _of_fsdp2(torch_fsdp),
    "minifsdp fully_shard": _of_fsdp2(minifsdp),
}

# ---- on a rank ------------------------------------------------------------------------------------------------------


def measure(name: str, size: str) -> dict[str, dict[str, Any]]:
    """The figures of each contender on this rank; the turns are joined."""
    platform = find(name)
    turns = [{contender: train(platform, contender, SIZES[size]) for contender in CONTENDERS} for _ in range(NUM_TURNS)]
    joined = {}
    for contender, last in turns[-1].items():
        of_it = [turn[contender] for turn in turns]
        figures = dict(last)
        for figure in ("ms", "host ms"):
            times = sorted(ms for one in of_it for ms in one[figure])
            figures[figure] = round(statistics.median(times), 3)
            figures[f"{figure}, range"] = [round(times[0], 3), round(times[-1], 3)]
        seconds = figures["ms"] / 1000
        figures["tokens/s"] = round(last["tokens"] / seconds)
        figures["TFLOP/s"] = round(last["flops"] / seconds / 1e12, 1)
        joined[contender] = figures
    return joined


def train(platform: Platform, contender: str, size: Size) -> dict[str, Any]:
    """Trains one contender; returns its losses, the times of all groups of steps, its memory and its runtime calls."""
    gc.collect()
    platform.empty_cache()
    before = platform.allocated()  # torch's FSDP1 keeps tensors of a deleted model
    torch.manual_seed(0)
    with device():
        model = GPT(width=size["width"], num_blocks=size["num_blocks"], num_heads=size["num_heads"])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = CONTENDERS[contender](model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    batches = [_batch(size, step) for step in range(NUM_WARM)]
    losses = [float(_step(trained, optimizer, batch)) for batch in batches]
    platform.allocated()
    times: dict[str, list[float]] = {"ms": [], "host ms": []}
    for _ in range(NUM_GROUPS):
        platform.synchronize()
        begin = time.perf_counter()
        for step in range(STEPS_IN_A_GROUP):
            _step(trained, optimizer, batches[step % NUM_WARM])
        issued = time.perf_counter()
        platform.synchronize()
        times["host ms"].append((issued - begin) * 1000 / STEPS_IN_A_GROUP)
        times["ms"].append((time.perf_counter() - begin) * 1000 / STEPS_IN_A_GROUP)
    memory = platform.peak_memory(before)
    calls = platform.runtime_calls(lambda: _step(trained, optimizer, batches[0]))
    tokens = size["batch"] * size["length"]
    attention = 6 * size["num_blocks"] * size["width"] * size["length"]  # causal: half of the products
    flops = tokens * (6 * num_parameters + attention)
    return {
        "losses": losses,
        **times,
        **memory,
        **calls,
        "tokens": tokens,
        "flops": flops,
        "parameters": num_parameters,
    }


def _batch(size: Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    text = torch.randint(VOCABULARY, (size["batch"], size["length"] + 1), generator=generator)
    return text.to(device())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Tensor:
    scores = model(text[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
