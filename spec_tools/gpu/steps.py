"""Training steps of minifsdp and of torch's FSDPs in bfloat16, one after the other on the same ranks: time and memory.

The model is the tutorials' GPT at the sizes of GPT-2. torch and minifsdp take turns. Both start from the same weights
and train on the same batches, so their losses must agree. If they do not, the task fails. Times are reported and never
make a task fail. For each contender:

* ``ms``: median time of a step, in which the host waits only at the end of each group of `STEPS_IN_A_GROUP` steps;
* ``host ms``: the time in which the host issues such a step. If it is close to ``ms``, the host limits the step;
* ``tokens/s``: tokens of one rank per second;
* ``peak GiB``: the most memory that tensors of this contender used during a step;
* ``syncs``, ``mallocs``: calls of CUDA's runtime in one step that wait, or allocate memory, counted by the profiler;
* ``comm ms``, ``exposed ms``: the time of NCCL's kernels in this step, and the part of it in which no other kernel ran.

A contender that fails, for example because it needs too much memory, has the error as its ``result``, and the others
still run. The task fails only if minifsdp fails and torch does not with the same API.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import minifsdp
from spec_tests.harness import device, pool
from spec_tools.gpu.tasks import Finding, device_module, first_error, on_ranks
from tutorials.gpt.model import GPT, VOCABULARY, Block

LIMIT = 300.0
NUM_GROUPS, STEPS_IN_A_GROUP, NUM_WARM = 5, 5, 3
TOLERANCE = 2e-2  # the largest relative difference of a loss from torch's; sums are in another order
# Width, blocks, heads, sequence length, batch.
MODELS = {
    "tiny": (32, 2, 2, 16, 2),
    "125M": (768, 12, 12, 1024, 8),
    "350M": (1024, 24, 16, 1024, 8),
    "1.3B": (2048, 24, 16, 1024, 4),
}
RUNTIME_CALLS = {
    "syncs": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "mallocs": ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"),
}


def work(num_ranks: int, model: str, api: str) -> Finding:
    """Trains a model with one API of torch, and then with the same API of minifsdp; the measurements of rank 0."""
    found: Finding = {"table": []}
    expected: list[float] = []
    is_torch_well = True
    for package in PACKAGES:
        row: dict[str, Any] = {"size": model, "ranks": num_ranks, "contender": f"{package} {api}"}
        found["table"].append(row)
        try:
            row |= on_ranks(num_ranks, train, LIMIT, package=package, api=api, model=model)[0]
        except pool.Failure as failure:
            row["result"] = first_error(str(failure))
            if package == "minifsdp" and is_torch_well:
                found["text"] = f"{row['contender']}:\n{failure}"
            is_torch_well = False
            continue
        expected = expected or row["losses"]
        if not torch.allclose(torch.tensor(row["losses"]), torch.tensor(expected), rtol=TOLERANCE):
            found["text"] = f"{row['contender']}: losses {row['losses']}, expected {expected}"
    return found


# ---- contenders -----------------------------------------------------------------------------------------------------


def _wrapped(package: Any, model: GPT) -> nn.Module:
    low = package.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = torch_fsdp.wrap.ModuleWrapPolicy({Block})
    wrapped: nn.Module = package.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, mixed_precision=low, use_orig_params=True, device_id=device()
    )
    return wrapped


def _sharded(package: Any, model: GPT) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
    low = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        package.fully_shard(block, mesh=mesh, mp_policy=low)
    sharded: nn.Module = package.fully_shard(model, mesh=mesh, mp_policy=low)
    return sharded


APIS: dict[str, Callable[[Any, GPT], nn.Module]] = {"FullyShardedDataParallel": _wrapped, "fully_shard": _sharded}
PACKAGES = {"torch": torch_fsdp, "minifsdp": minifsdp}

# ---- on a rank ------------------------------------------------------------------------------------------------------


def train(package: str, api: str, model: str) -> dict[str, Any]:
    """The losses, the time of a step, the memory, and what the profiler finds in one step."""
    width, num_blocks, num_heads, length, batch = MODELS[model]
    is_cuda = device().type == "cuda"
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()  # torch's FSDP1 keeps tensors of a deleted model
    torch.manual_seed(0)
    with device():
        gpt = GPT(width=width, num_blocks=num_blocks, num_heads=num_heads)
    trained = APIS[api](PACKAGES[package], gpt)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    texts = [_text(batch, length, step) for step in range(NUM_WARM)]
    losses = [float(_step(trained, optimizer, text)) for text in texts]
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    times, host_times = [], []
    for _ in range(NUM_GROUPS):
        device_module().synchronize()
        begin = time.perf_counter()
        for step in range(STEPS_IN_A_GROUP):
            _step(trained, optimizer, texts[step % NUM_WARM])
        host_times.append((time.perf_counter() - begin) / STEPS_IN_A_GROUP)
        device_module().synchronize()
        times.append((time.perf_counter() - begin) / STEPS_IN_A_GROUP)
    seconds = statistics.median(times)
    figures: dict[str, Any] = {
        "losses": losses,
        "ms": round(1000 * seconds, 3),
        "host ms": round(1000 * statistics.median(host_times), 3),
        "tokens/s": round(batch * length / seconds),
    }
    if is_cuda:
        figures["peak GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        figures |= _profiled(lambda: _step(trained, optimizer, texts[0]))
    return figures


def _text(batch: int, length: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (batch, length + 1), generator=generator).to(device())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Tensor:
    scores = model(text[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _profiled(step: Callable[[], object]) -> dict[str, float]:
    """Runs a step under the profiler: its calls of CUDA's runtime, and the time of its exposed communication."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
    events = list(profile.events())
    found: dict[str, float] = {
        what: sum(event.name in group for event in events) for what, group in RUNTIME_CALLS.items()
    }
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    found["comm ms"] = round(uncovered(spans[True], []) / 1000, 3)
    found["exposed ms"] = round(uncovered(spans[True], spans[False]) / 1000, 3)
    return found


def uncovered(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of the spans is active, and none of the others."""
    moments = []
    for kind, some in enumerate((spans, others)):
        for begin, end in some:
            moments += [(begin, kind, 1), (end, kind, -1)]
    active, found, last = [0, 0], 0.0, 0.0
    for at, kind, step in sorted(moments):
        if active[0] and not active[1]:
            found += at - last
        active[kind] += step
        last = at
    return found
