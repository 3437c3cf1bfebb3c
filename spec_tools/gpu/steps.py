"""Training steps of minifsdp and of torch's FSDPs, one after the other on the same ranks: time, memory, host work.

The model is the tutorials' GPT at the sizes of GPT-2. All contenders start from the same weights and train on the same
batches, so their losses must agree. If one does not, the chunk fails. Times are reported and never make a chunk fail.

There are three precisions, see `PRECISIONS`. For each contender:

* ``ms``: median time of a step, in which the host waits only at the end of each group of `STEPS_IN_A_GROUP` steps;
* ``host ms``: the time in which the host issues such a step, and ``host share``, that divided by ``ms``. If it is close
  to 1, the host limits the step;
* ``tokens/s``: tokens of one rank per second;
* ``TFLOP/s``: six operations per parameter and token, plus attention; of one rank. ``MFU %`` is this figure in percent
  of the peak of the card for the dtype (``cards.py``), if the table has the card and each rank has one of its own;
* ``exposed ms``: time of a step in which the GPU runs only kernels of NCCL (``intervals.py``), from the profiler;
* ``peak GiB``: the most memory that tensors of this contender used during a step;
* ``syncs``, ``mallocs``, ``launches``: calls of CUDA's runtime in one step, counted by the profiler.

The contenders take turns, because clocks and temperatures change. With several ranks on one GPU, no time has a meaning.

A contender that runs out of memory has this as its result, and the others still run. The chunk fails only if minifsdp
runs out of memory and torch does not with the same API.

Spec: KIT-09, KIT-19.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import minifsdp
from spec_tests.harness import device, pool
from spec_tools.gpu.cards import find_card
from spec_tools.gpu.intervals import exposed
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform, find
from spec_tools.gpu.smoke import own_device
from tutorials.gpt.model import GPT, VOCABULARY, Block

__all__ = ["CONTENDERS", "PRECISIONS", "SIZES", "Precision", "Size", "estimate", "joined", "judged", "train", "work"]

NUM_TURNS, STEPS_IN_A_GROUP, NUM_WARM = 2, 5, 3

Size = dict[str, int]
SIZES: dict[str, Size] = {
    "tiny": {"width": 32, "num_blocks": 2, "num_heads": 2, "length": 16, "batch": 2},
    "125M": {"width": 768, "num_blocks": 12, "num_heads": 12, "length": 1024, "batch": 8},
    "350M": {"width": 1024, "num_blocks": 24, "num_heads": 16, "length": 1024, "batch": 8},
    "1.3B": {"width": 2048, "num_blocks": 24, "num_heads": 16, "length": 1024, "batch": 4},
}


@dataclass(frozen=True)
class Precision:
    """How numbers are stored.

    Attributes:
        dtype: of parameters and activations in forward and backward, and of the peak of the card.
        offload: whether parameters and optimizer states are on the CPU.
        num_groups: groups of steps in a turn. Optimizer steps on the CPU are slow.
        tolerance: largest relative difference of a loss from torch's. Sums are in another order.
    """

    dtype: torch.dtype
    offload: bool
    num_groups: int
    tolerance: float


PRECISIONS = {
    "fp32": Precision(torch.float32, offload=False, num_groups=3, tolerance=1e-3),
    "bf16": Precision(torch.bfloat16, offload=False, num_groups=3, tolerance=2e-2),
    "bf16, offload": Precision(torch.bfloat16, offload=True, num_groups=1, tolerance=2e-2),
}
OUT_OF_MEMORY = ("out of memory", "outofmemoryerror", "cudaerrormemoryallocation", "can't allocate memory")
# For an estimate: seconds until the ranks have started, and of one turn of a contender. On one H200, a turn of 125M
# took 2 seconds and one of 350M 3. The figures for offload assume that the CPU updates 3e8 parameters per second.
SECONDS_TO_START = 15.0
SECONDS_OF_A_TURN = {"tiny": 2.0, "125M": 3.0, "350M": 4.0, "1.3B": 8.0}
PARAMETERS = {"tiny": 0.0, "125M": 85e6, "350M": 302e6, "1.3B": 1208e6}


def estimate(num_ranks: int, size: str, precision: str, num_turns: int) -> float:
    """Seconds of a chunk."""
    turn = SECONDS_OF_A_TURN[size]
    if PRECISIONS[precision].offload:
        turn += (NUM_WARM + STEPS_IN_A_GROUP) * PARAMETERS[size] / num_ranks / 3e8
    return SECONDS_TO_START + num_turns * len(CONTENDERS) * turn


def work(
    platform: Platform, num_ranks: int, size: str, precision: str, num_turns: int, hang_limit: float
) -> Iterator[dict[str, Any]]:
    """Yields one finding for each contender: the measurements of rank 0."""
    contenders = [contender for contender in CONTENDERS if _can_run(platform, contender, PRECISIONS[precision])]
    turns: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    failures: dict[str, str] = {}
    arguments = {"name": platform.name, "size": size, "precision": precision}
    for _ in range(num_turns):
        for contender in contenders:
            if contender in failures:
                continue
            try:
                one = on_ranks(platform, num_ranks, train, hang_limit, contender=contender, **arguments)[0]
                turns[contender].append(one)
            except pool.Failure as failure:
                failures[contender] = str(failure)
    about = {"size": size, "ranks": num_ranks, "precision": precision}
    expected = next((turns[contender][0]["losses"] for contender in contenders if contender not in failures), [])
    for contender in contenders:
        finding = {**about, "contender": contender}
        if contender in failures:
            yield finding | _lost(contender, failures)
            continue
        has_own_device = num_ranks <= platform.num_devices()
        finding |= joined(turns[contender], PRECISIONS[precision].dtype, has_own_device)
        yield judged(finding, expected)


def judged(finding: dict[str, Any], expected: Sequence[float]) -> dict[str, Any]:
    """The finding with its outcome: whether its losses are the ``expected`` ones of the first contender."""
    tolerance = PRECISIONS[finding["precision"]].tolerance
    pairs = zip(finding["losses"], expected, strict=True)
    if all(abs(mine - right) <= tolerance * abs(right) for mine, right in pairs):
        return {**finding, "outcome": "passed"}
    text = f"{finding['size']}, {finding['contender']}: losses {finding['losses']}, expected {expected}"
    return {**finding, "outcome": "failed", "text": text}


def _can_run(platform: Platform, contender: str, precision: Precision) -> bool:
    """False for offload with torch's FSDP1 on a CPU: it pins memory, which needs an accelerator."""
    return not (precision.offload and platform.device_type == "cpu" and contender == "torch FullyShardedDataParallel")


def _lost(contender: str, failures: Mapping[str, str]) -> dict[str, Any]:
    """The result of a contender without figures."""
    if not _is_out_of_memory(failures[contender]):
        return {"outcome": "failed", "text": f"{contender}:\n{failures[contender]}"}
    peer = contender.replace("minifsdp", "torch")
    if _is_out_of_memory(failures.get(peer, "")):
        return {"outcome": "passed", "result": "out of memory"}
    text = f"{contender} runs out of memory, and {peer} does not:\n{failures[contender]}"
    return {"outcome": "failed", "result": "out of memory", "text": text}


def _is_out_of_memory(failure: str) -> bool:
    """Whether a message contains the words of torch for a GPU or the CPU, of CUDA, or of NCCL."""
    return any(words in failure.lower() for words in OUT_OF_MEMORY)


def joined(turns: Sequence[dict[str, Any]], dtype: torch.dtype, has_own_device: bool) -> dict[str, Any]:
    """The figures of one contender from those of its turns."""
    last = turns[-1]
    times = {figure: sorted(ms for turn in turns for ms in turn[figure]) for figure in ("ms", "host ms")}
    ms, host_ms = (statistics.median(times[figure]) for figure in ("ms", "host ms"))
    rate = last["flops"] / ms / 1e9
    figures = {
        **last,
        "ms": round(ms, 3),
        "host ms": round(host_ms, 3),
        "host share": round(host_ms / ms, 2),
        "tokens/s": round(1000 * last["tokens"] / ms),
        "TFLOP/s": round(rate, 1),
        "all ms": [round(one, 3) for one in times["ms"]],
    }
    for figure, values in times.items():
        figures[f"{figure}, range"] = [round(values[0], 3), round(values[-1], 3)]
    card = find_card(last["card"]) if has_own_device else None
    if card is not None:
        figures["MFU %"] = round(100 * rate / card.rates[str(dtype).removeprefix("torch.")], 1)
    return figures


# ---- contenders -----------------------------------------------------------------------------------------------------


def _of_fsdp1(package: Any) -> Callable[[GPT, Precision], nn.Module]:
    """The wrapper of minifsdp or torch."""

    def build(model: GPT, precision: Precision) -> nn.Module:
        low = package.MixedPrecision(param_dtype=precision.dtype, reduce_dtype=torch.float32)
        policy = torch_fsdp.wrap.ModuleWrapPolicy({Block})
        # torch needs a device for its FSDP1, the CPU too.
        where = own_device() or device()
        wrapped: nn.Module = package.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=low if precision.dtype != torch.float32 else None,
            cpu_offload=package.CPUOffload(offload_params=True) if precision.offload else None,
            use_orig_params=True,
            device_id=where,
        )
        return wrapped

    return build


def _of_fsdp2(package: Any) -> Callable[[GPT, Precision], nn.Module]:
    """``fully_shard`` of minifsdp or torch."""

    def build(model: GPT, precision: Precision) -> nn.Module:
        mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh}
        if precision.dtype != torch.float32:
            policy = package.MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
            options["mp_policy"] = policy
        if precision.offload:
            options["offload_policy"] = package.CPUOffloadPolicy(pin_memory=device().type != "cpu")
        for block in model.blocks:
            package.fully_shard(block, **options)
        sharded: nn.Module = package.fully_shard(model, **options)
        return sharded

    return build


CONTENDERS: dict[str, Callable[[GPT, Precision], nn.Module]] = {
    "torch FullyShardedDataParallel": _of_fsdp1(torch_fsdp),
    "minifsdp FullyShardedDataParallel": _of_fsdp1(minifsdp),
    "torch fully_shard": _of_fsdp2(torch_fsdp),
    "minifsdp fully_shard": _of_fsdp2(minifsdp),
}

# ---- on a rank ------------------------------------------------------------------------------------------------------


def train(name: str, contender: str, size: str, precision: str) -> dict[str, Any]:
    """One turn of a contender: its losses, the times of all groups of steps, its memory, and its calls and kernels."""
    platform, sizes = find(name), SIZES[size]
    gc.collect()
    platform.empty_cache()
    before = platform.allocated()  # torch's FSDP1 keeps tensors of a deleted model
    torch.manual_seed(0)
    with device():
        model = GPT(width=sizes["width"], num_blocks=sizes["num_blocks"], num_heads=sizes["num_heads"])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = CONTENDERS[contender](model, PRECISIONS[precision])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    batches = [_batch(sizes, step) for step in range(NUM_WARM)]
    losses = [float(_step(trained, optimizer, batch)) for batch in batches]
    platform.allocated()
    times: dict[str, list[float]] = {"ms": [], "host ms": []}
    for _ in range(PRECISIONS[precision].num_groups):
        platform.synchronize()
        begin = time.perf_counter()
        for step in range(STEPS_IN_A_GROUP):
            _step(trained, optimizer, batches[step % NUM_WARM])
        issued = time.perf_counter()
        platform.synchronize()
        times["host ms"].append((issued - begin) * 1000 / STEPS_IN_A_GROUP)
        times["ms"].append((time.perf_counter() - begin) * 1000 / STEPS_IN_A_GROUP)
    memory = platform.peak_memory(before)
    calls, kernels = platform.profiled(lambda: _step(trained, optimizer, batches[0]))
    tokens = sizes["batch"] * sizes["length"]
    return {
        "losses": losses,
        **times,
        **memory,
        **calls,
        **({"exposed ms": round(exposed(kernels) / 1000, 3)} if kernels else {}),
        "card": platform.card()[0],
        "tokens": tokens,
        "flops": num_flops(sizes, num_parameters),
        "parameters": num_parameters,
    }


def num_flops(size: Size, num_parameters: int) -> int:
    """Operations of one rank in a step: a multiplication and an addition, in forward once and in backward twice."""
    attention = 6 * size["num_blocks"] * size["width"] * size["length"]  # causal: half of the products
    return size["batch"] * size["length"] * (6 * num_parameters + attention)


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
