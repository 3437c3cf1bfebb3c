"""A backend that counts the messages between CPUs."""

from __future__ import annotations

from typing import Any

import torch


class Counted:
    """A backend that counts its messages.

    Attributes:
        sent: bytes that this rank sends, by destination rank.
        num_sends: number of messages.
        num_in_thread: number of collectives that run in gloo's thread.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.sent: dict[int, int] = {}
        self.num_sends = self.num_in_thread = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        self.num_sends += 1
        self.sent[target] = self.sent.get(target, 0) + sum(tensor.nbytes for tensor in tensors)
        return self._backend.send(tensors, target, tag)

    def alltoall_base(self, output: torch.Tensor, whole: torch.Tensor, *splits: Any) -> Any:
        self.num_in_thread += 1
        parts = whole.split(splits[1]) if splits[1] else whole.tensor_split(self.size())
        self.sent = {rank: part.nbytes for rank, part in enumerate(parts) if rank != self.rank() and part.nbytes}
        return self._backend.alltoall_base(output, whole, *splits)
