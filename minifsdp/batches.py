"""Support for ranks with different amounts of data: stop together, and weight losses by tokens.

Two problems occur when the data does not divide evenly over the ranks, and neither causes an error message.

1. *One rank has fewer batches.* Its loop ends, but the other ranks issue more collectives and wait for it. So before
   each batch, the ranks check whether all of them have a batch. All ranks stop when the first rank has none. Two ranks
   with 3 and 5 batches::

    rank 0      b0  b1  b2  -            3 steps
    rank 1      b0  b1  b2  (b3 b4)      3 steps, two batches are left over

   The check is an all-reduce of one number of 8 bytes. The next batch is fetched and the all-reduce is issued before
   the current batch is computed, so they overlap. If a loader raises, all ranks stop with its error.

2. *One rank has fewer tokens.* Gradients are averaged over ranks. If each rank's loss is a mean over its own tokens, a
   token on a rank with few tokens counts more. With 1 token on rank 0 and 3 on rank 1, and loss sums L0 and L1::

    mean of means        (L0 / 1 + L1 / 3) / 2        rank 0's token counts three times as much
    mean over tokens     (L0 + L1) / 4
    scaled sums          (L0 * 2/4 + L1 * 2/4) / 2    the same: each sum times ranks / all tokens

*In torch:* ``Join`` solves the first problem for DDP: ranks that have finished take part with zeros. It does not
support FSDP. For the second problem, torch has no function.

Spec: BATCH-01 to BATCH-08.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from minifsdp.engine.comm_streams import COMPLETED, CommStream, Handle
from minifsdp.engine.events import events
from minifsdp.engine.exchange import device_of, exchange
from minifsdp.engine.mesh import Group, default_group
from minifsdp.engine.messages import message, warn

__all__ = ["token_scale", "token_weighted", "while_all_have_data"]

T = TypeVar("T")
# A list with the next batch, empty if there is none, or the error of the loader. And a function that waits for the
# all-reduce and returns whether every rank has a batch.
_Fetched = tuple[Any, Callable[[], bool]]


def while_all_have_data(
    batches: Iterable[T],
    group: dist.ProcessGroup | None = None,
    *,
    count_left: bool = False,
) -> Iterator[T]:
    """Yields this rank's batches while all ranks have one. Every rank must iterate, and stop at the same batch.

    The next batch is fetched before the current batch is computed. At the end, the batch that was fetched and the
    remaining batches of the loader are dropped.

    Args:
        batches: a loader or any other iterable. The function iterates over it once.
        group: the group of ranks that stop together; by default all ranks.
        count_left: whether to read and count the remaining batches at the end, and warn if any rank has some.

    Yields:
        The elements of ``batches``.

    Raises:
        RuntimeError: if a loader raises an error on any rank. Every rank raises it, with the failed rank and its error.
    """
    loader = iter(batches)
    ranks = Group.of(group or default_group("group"))
    device = _device_to_send_from(ranks, torch.device("cpu"))
    # A separate communication stream, so that reading the result does not wait for the compute stream.
    comm_stream = CommStream("batches", device)
    batch, all_have_one = _fetch(loader, ranks, device, comm_stream)
    try:
        while all_have_one():
            following, all_have_one = _fetch(loader, ranks, device, comm_stream)
            yield batch[0]
            batch = following
    except GeneratorExit:
        # All ranks leave the loop while an all-reduce is in flight, so wait for it.
        all_have_one()
        raise
    error = batch if isinstance(batch, Exception) else None
    mine: int | str = f"{type(error).__name__}: {error}"
    if error is None:
        mine = len(batch) + sum(1 for _ in loader) if count_left else 0
    by_rank = exchange([ranks], mine)
    if failed := [
        f"rank {rank}: {text}"
        for rank, text in by_rank.items()
        if isinstance(text, str)
    ]:
        raise RuntimeError(
            message("loader-failed", failed="; ".join(failed))
        ) from error
    if counts := [
        f"{number} on rank {rank}" for rank, number in by_rank.items() if number
    ]:
        warn(message("batches-left", counts=", ".join(counts)))


def _fetch(
    loader: Iterator[Any], ranks: Group, device: torch.device, comm_stream: CommStream
) -> _Fetched:
    """Fetches a batch and issues the all-reduce."""
    batch: list[Any] | Exception
    try:
        batch = list(islice(loader, 1))
    except Exception as error:
        batch = error
    has_one = isinstance(batch, list) and len(batch) == 1
    with comm_stream:
        num_without = torch.full((1,), not has_one, dtype=torch.int64, device=device)
        on_cpu = [num_without]
        # It is complete when the CPU has the result, so an observer sees a rank that waits for it.
        work = events.collective(
            "while_all_have_data",
            ranks,
            [num_without],
            _all_reduce,
            (ranks, on_cpu, comm_stream),
        )

    def all_have_one() -> bool:
        work.wait()
        return on_cpu[0].item() == 0

    return batch, all_have_one


def _all_reduce(
    ranks: Group, tensors: list[torch.Tensor], comm_stream: CommStream
) -> Handle:
    """Sums ``tensors`` over the ranks. On an accelerator, replaces them by copies on the CPU."""
    work: Handle = (
        ranks.process_group.allreduce(tensors, collectives.ALL_REDUCE) or COMPLETED
    )
    if comm_stream.stream is None:
        return work
    work.wait()
    tensors[:] = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    event = comm_stream.stream.record_event()
    return SimpleNamespace(wait=event.synchronize)


def _device_to_send_from(group: Group, preferred: torch.device) -> torch.device:
    """``preferred``, if the process group can send from a device of its type; otherwise the current accelerator."""
    # For example "cpu:gloo,cuda:nccl".
    kinds = [
        part.partition(":")[0]
        for part in dist.get_backend_config(group.process_group).split(",")
    ]
    if preferred.type in kinds:
        return preferred
    return device_of(group) or torch.device(
        kinds[0], torch.get_device_module(kinds[0]).current_device()
    )


def token_scale(
    num_tokens: int | torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns the factor for a *sum* of losses that makes the mean over ranks equal to the mean over tokens.

    Every rank of the group must call it, once for each optimizer step.

    Args:
        num_tokens: number of tokens of this rank in the whole step, over all micro-batches; can be 0. If it is a tensor
            on an accelerator, it is reduced there without a CPU synchronization.
        group: the group of ranks over which gradients are averaged; by default all ranks.

    Returns:
        Number of ranks / tokens of all ranks, a float32 scalar on the device of ``num_tokens``; 0 without tokens.
    """
    ranks = Group.of(group or default_group("group"))
    given = (
        num_tokens.device
        if isinstance(num_tokens, torch.Tensor)
        else torch.device("cpu")
    )
    device = _device_to_send_from(ranks, given)
    total = (
        torch.as_tensor(num_tokens, dtype=torch.float64, device=device)
        .detach()
        .clone()
        .reshape(1)
    )
    collectives.all_reduce(ranks, total, kind="token_scale").wait()
    return torch.where(total > 0, ranks.size / total, 0.0).float().squeeze(0)


def token_weighted(
    loss_sum: torch.Tensor,
    num_tokens: int | torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns the loss to call ``backward`` on, given the sum of the losses of this rank's tokens.

    The gradient of the result, averaged over ranks, is the gradient of the mean over all tokens of all ranks. The mean
    of the result over ranks is this mean loss. Every rank of the group must call it. With several micro-batches in a
    step, call `token_scale` once instead, with the tokens of all micro-batches.

    Args:
        loss_sum: a scalar. On a rank without tokens, pass 0 times a model output, so that backward also runs.
        num_tokens, group: see `token_scale`.
    """
    return loss_sum * token_scale(num_tokens, group).to(loss_sum.device, loss_sum.dtype)
