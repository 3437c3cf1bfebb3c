"""Runs a healthy program on ranks, and checks that no message reports an error.

A check may print a line about a rank that is late, with the collective that each rank waits for. It must not report an
error of a rank.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks

APIS = ("wrapper", "fully_shard")
ACCUSES = re.compile(
    r"cannot come|(has|have) ended|(has|have) failed|ranks part at|diverge|differ|not sent each other|"
    r"about to (send|gather)|told to end|SIGTERM has come|is stopped|Traceback|\w+Error\b|minifsdp\.\w+ FILE"
)


def accusations(text: str) -> list[str]:
    """The lines of ``text`` that report an error."""
    return [line for line in text.splitlines() if ACCUSES.search(line)]


@contextmanager
def says_nothing_wrong() -> Iterator[None]:
    """Checks that this process reports no error to stderr inside the block.

    Raises:
        AssertionError: it does.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")
            print(text, file=sys.stderr, end="", flush=True)
    assert not accusations(text)


def healthy(num_ranks: int, apis: Iterable[str] | None = APIS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the test's body on ranks, once for each API, and checks that the ranks report no error."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            with says_nothing_wrong():
                body(**arguments)
                # Ranks wait for each other at the end of a test, like a program that ends normally.
                dist.barrier()

        on_ranks = ranks(num_ranks)(run)
        return pytest.mark.parametrize("api", apis)(on_ranks) if apis else on_ranks

    return decorate
