"""Ranks with different amounts of data: stopping together, and weighting by tokens.

Two problems occur when the data does not divide evenly over the ranks, and neither causes an error message.

1. *One rank has fewer batches.* Its loop ends, but the other ranks continue with collectives that it does not join. So
   before each batch, the ranks check whether all of them have one. All ranks stop when the first rank has none. Two
   ranks with 3 and 5 batches::

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
support FSDP. For the second problem there is nothing.

Spec: BATCH-01 to BATCH-08.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

from minifsdp.engine import collectives
from minifsdp.engine.collectives import Collective
from minifsdp.engine.comm_streams import CommStream
from minifsdp.engine.mesh import Group, default_group
from minifsdp.engine.messages import message, warn

__all__ = ["token_scale", "token_weighted", "while_all_have_data"]

T = TypeVar("T")
_FAILED, _HAS_NONE, _HAS_ONE = 0, 1, 2


def while_all_have_data(
    batches: Iterable[T], group: dist.ProcessGroup | None = None, *, count_left: bool = False
) -> Iterator[T]:
    """Yields this rank's batches while all ranks have one. Every rank must iterate, and break at the same batch.

    The next batch is fetched before the current one is computed. At the end, this batch and the remaining batches of
    the loader are dropped.

    Args:
        batches: a loader or any other iterable. It is iterated over once.
        group: the ranks that stop together; by default all ranks.
        count_left: whether to count the remaining batches at the end and warn if any rank has some. This reads them.

    Yields:
        The elements of ``batches``.

    Raises:
        RuntimeError: if a loader raises on any rank; raised on every rank, with the failed rank and its error.
    """
    talk = _Talk(Group.of(group or default_group("group")))
    loader = iter(batches)
    batch, asked = _next_and_ask(loader, talk)
    try:
        while talk.least(asked) == _HAS_ONE:
            following, asked = _next_and_ask(loader, talk)
            yield batch[0]
            batch = following
    except GeneratorExit:
        # All ranks have left the loop while an all-reduce is in flight. Wait for it.
        talk.least(asked)
        raise
    _end(batch, loader, talk, count_left)


def _next_and_ask(loader: Iterator[T], talk: _Talk) -> tuple[list[Any], Any]:
    """Fetches a batch and issues the all-reduce. Returns ``[batch]``, ``[error, True]`` or ``[]``, and its handle."""
    try:
        batch: list[Any] = [next(loader)]
    except StopIteration:
        return [], talk.ask(_HAS_NONE)
    except Exception as error:
        return [error, True], talk.ask(_FAILED)
    return batch, talk.ask(_HAS_ONE)


def _end(batch: list[Any], loader: Iterator[Any], talk: _Talk, count_left: bool) -> None:
    error = batch[0] if len(batch) == 2 else None
    left = 0
    if count_left and error is None:
        left = len(batch) + sum(1 for _ in loader)
    said = talk.everybody(f"{type(error).__name__}: {error}" if error is not None else left)
    failed = [f"rank {rank}: {text}" for rank, text in said.items() if isinstance(text, str)]
    if failed:
        raise RuntimeError(message("loader-failed", failed="; ".join(failed))) from error
    counts = {rank: number for rank, number in said.items() if number}
    if counts:
        warn(message("batches-left", counts=", ".join(f"{number} on rank {rank}" for rank, number in counts.items())))


class _Talk:
    """Communication between the ranks about their loaders."""

    def __init__(self, group: Group) -> None:
        self._group = group
        kinds = [torch.device(kind) for kind in group.process_group._device_types]
        self._device = next((kind for kind in kinds if kind.type == "cpu"), None) or _current(kinds[0])
        # A separate communication stream, so that reading the result does not wait for the compute stream.
        self._comm_stream = CommStream("batches", self._device)
        self._options = AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._options.asyncOp = False

    def ask(self, mine: int) -> tuple[torch.Tensor, Any]:
        """Issues the all-reduce of ``mine``. Pass the returned value to `least`."""
        with self._comm_stream as comm_stream:
            number = torch.full((1,), mine, device=self._device)
            send = self._group.process_group.allreduce
            how = (send, [number], self._options)
            work = Collective("while_all_have_data", self._group, 8, *how, on_cpu=number.is_cpu)
            if comm_stream.stream is None:
                return number, work.wait
            work.wait()
            answer, event = number.to("cpu", non_blocking=True), comm_stream.stream.record_event()
            # It is complete when the CPU has the result, so the watchdog sees a rank that waits for it.
            work.wait_for(event.synchronize)
            return answer, work.wait

    def least(self, asked: tuple[torch.Tensor, Any]) -> int:
        """Waits for the all-reduce and returns the minimum over all ranks."""
        number, wait = asked
        wait()
        return int(number.item())

    def everybody(self, mine: Any) -> dict[int, Any]:
        """All-gathers ``mine`` and returns the values by rank."""
        said: list[Any] = [None] * self._group.size
        collectives.call(dist.all_gather_object, self._group, said, mine)
        return dict(zip(self._group.ranks, said, strict=True))


def _current(device: torch.device) -> torch.device:
    return torch.device(device.type, torch.get_device_module(device).current_device())


def token_scale(num_tokens: int | torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the factor for a *sum* of losses that makes the mean over ranks equal to the mean over tokens.

    Every rank of the group must call it, once for each optimizer step.

    Args:
        num_tokens: number of tokens of this rank in the whole step, over all micro-batches; can be 0. If it is a tensor
            on an accelerator, it is reduced there without a CPU synchronization.
        group: the ranks over which gradients are averaged; by default all ranks.

    Returns:
        Number of ranks / tokens of all ranks, a float32 scalar on the device of ``num_tokens``; 0 if there are none.
    """
    shared = Group.of(group or default_group("group"))
    kinds = [torch.device(kind) for kind in shared.process_group._device_types]
    device = num_tokens.device if isinstance(num_tokens, torch.Tensor) else torch.device("cpu")
    if device.type not in {kind.type for kind in kinds}:
        device = _current(kinds[0])
    total = torch.as_tensor(num_tokens, device=device).detach().clone().to(torch.float64).reshape(1)
    options = AllreduceOptions()
    options.asyncOp = False
    send = shared.process_group.allreduce
    Collective("token_scale", shared, 8, send, [total], options, on_cpu=total.is_cpu).wait()
    return torch.where(total > 0, shared.size / total, 0.0).float().squeeze(0)


def token_weighted(
    loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns the loss to call ``backward`` on, given the sum of the losses of this rank's tokens.

    Its gradient, averaged over ranks, is the gradient of the mean over all tokens of all ranks. Its own mean over ranks
    is this mean loss. Every rank of the group must call it. With several micro-batches in a step, call `token_scale`
    once instead, with the tokens of all micro-batches.

    Args:
        loss_sum: a scalar. On a rank without tokens, pass 0 times a model output, so that backward runs there too.
        num_tokens, group: see `token_scale`.
    """
    return loss_sum * token_scale(num_tokens, group).to(loss_sum.device, loss_sum.dtype)
