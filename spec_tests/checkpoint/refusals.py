"""What is said when something is refused, and what is warned of.

A mistake that every rank makes must end in a message on every rank, and before anybody has sent anything: a rank that
stops while another one waits for it looks like a hang. So a refusal is judged by four things: its type, the rank in its
text, the words that help (what is wrong, and the remedy), and that the wire stayed silent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from spec_tests.models.running import Wire

__all__ = ["caught_warnings", "refused"]


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """The block raises ``kind`` with the rank and all ``parts`` in its message, and starts no collective."""
    with Wire() as wire, pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    for part in (f"rank {dist.get_rank()}", *parts):
        assert part in message, f"{part!r} is not in: {message}"
    assert wire.sent == [], "a collective was started before the refusal"


@contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning of the block, also one that was given before elsewhere; none of them becomes an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
