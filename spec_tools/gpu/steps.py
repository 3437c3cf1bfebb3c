"""Training steps of minifsdp and of torch's FSDPs in bfloat16, one after the other on the same ranks: time and memory.

The model is the tutorials' GPT at the sizes of GPT-2. All contenders start from the same weights and train on the same
batches, so their losses must agree. If one does not, the job fails. Times are reported and never make a job fail. For
each contender:

* ``ms``: median time of a step, in which the host waits only at the end of each group of `STEPS_IN_A_GROUP` steps;
* ``host ms``: the time in which the host issues such a step. If it is close to ``ms``, the host limits the step;
* ``tokens/s``: tokens of one rank per second;
* ``peak GiB``: the most memory that tensors of this contender used during a step;
* ``syncs``, ``mallocs``: calls of CUDA's runtime in one step that wait, or allocate memory, counted by the profiler.

A contender that fails, for example because it needs too much memory, has the error as its ``result``, and the others
still run. The job fails only if minifsdp fails and torch does not with the same API.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import minifsdp
from spec_tests.harness import device, pool
from spec_tools.gpu.job import Finding, device_module, on_ranks
from spec_tools.gpu.process import first_error
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


def work(num_ranks: int, models: Sequence[str]) -> Iterator[Finding]:
    """Yields one finding for each model and contender: the measurements of rank 0."""
    for model in models:
        expected: list[float] = []
        failed = set()
        for contender in CONTENDERS:
            finding: Finding = {"size": model, "ranks": num_ranks, "contender": contender}
            try:
                finding |= on_ranks(num_ranks, train, LIMIT, contender=contender, model=model)[0]
            except pool.Failure as failure:
                failed.add(contender)
                finding["result"] = first_error(str(failure))
                if contender.replace("minifsdp", "torch") not in failed:
                    finding["text"] = f"{contender}:\n{failure}"
            else:
                losses = finding["losses"]
                expected = expected or losses
                if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=TOLERANCE):
                    finding["text"] = f"{contender}: losses {losses}, expected {expected}"
            yield finding


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


CONTENDERS: dict[str, tuple[Callable[[Any, GPT], nn.Module], Any]] = {
    "torch FullyShardedDataParallel": (_wrapped, torch_fsdp),
    "minifsdp FullyShardedDataParallel": (_wrapped, minifsdp),
    "torch fully_shard": (_sharded, torch_fsdp),
    "minifsdp fully_shard": (_sharded, minifsdp),
}

# ---- on a rank ------------------------------------------------------------------------------------------------------


def train(contender: str, model: str) -> dict[str, Any]:
    """One turn of a contender: its losses, the times of all groups of steps, its memory, and its calls."""
    width, num_blocks, num_heads, length, batch = MODELS[model]
    is_cuda = device().type == "cuda"
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()  # torch's FSDP1 keeps tensors of a deleted model
    torch.manual_seed(0)
    with device():
        gpt = GPT(width=width, num_blocks=num_blocks, num_heads=num_heads)
    build, package = CONTENDERS[contender]
    trained = build(package, gpt)
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
        figures |= _calls(lambda: _step(trained, optimizer, texts[0]))
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


def _calls(step: Callable[[], object]) -> dict[str, int]:
    """Runs a step under the profiler; returns the number of its calls of CUDA's runtime."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
    names = [event.name for event in profile.events()]
    return {what: sum(name in group for name in names) for what, group in RUNTIME_CALLS.items()}
