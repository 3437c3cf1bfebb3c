"""Checks of errors and warnings.

A mistake on all ranks must raise an error on every rank before any collective starts. If one rank raises while another
one waits for it, the program hangs. So these checks cover the type of the error, the rank in its message, the parts of
the message that describe the mistake and its fix, and the absence of collectives.
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
def refused(kind: type[Exception], *parts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Checks that the block raises ``kind`` with the rank and all ``parts`` in its message and starts no collective."""
    with Wire() as wire, pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    for part in (f"rank {dist.get_rank()}", *parts):
        assert part in message, f"{part!r} is not in: {message}"
    assert wire.sent == [], "a collective was started before the refusal"


@contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Records every warning of the block, including repeated ones; none of them becomes an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
