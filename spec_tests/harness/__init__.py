"""Runs a spec test on several ranks.

    @pytest.mark.spec("SHARD-04")
    @ranks(2)
    def test_full_shard_frees_after_forward() -> None:
        ...                                 # runs on every rank, with a default process group

The body is an ordinary function. The decorator replaces it with a function that sends it to a pool of processes. The
pool lives for the whole session (see ``pool.py``). If a rank raises, the test fails with that rank's error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.harness import pool, worker
from spec_tests.harness.worker import kept

__all__ = ["device", "kept", "plain_tensor", "rank_among_fake_ranks", "ranks"]

HANG_LIMIT = 60.0


def ranks(num_ranks: int, timeout: float = HANG_LIMIT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the test's body on ``num_ranks`` processes. After ``timeout`` seconds the test counts as hanging.

    Raises:
        TypeError: the body is not a module-level function, so a rank cannot find it by name.
    """
    return _on_a_pool(num_ranks, timeout, is_alone=False)


def rank_among_fake_ranks(
    num_ranks: int, timeout: float = HANG_LIMIT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the test's body in one process: rank 0 of a group whose other ranks are fake. Simulated device only.

    A log of such a test can be replayed in other orders, and the cost does not depend on ``num_ranks``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.simulated(_on_a_pool(num_ranks, timeout, is_alone=True)(body))  # type: ignore[no-any-return]

    return decorate


def _on_a_pool(
    num_ranks: int, timeout: float, *, is_alone: bool
) -> Callable[[Callable[..., None]], Callable[..., None]]:

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if body.__qualname__ != body.__name__:
            raise TypeError(
                f"{body.__qualname__} runs on ranks, which find it by name: move it to the top of its module"
            )

        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            failure: str | None = None
            try:
                pool.run(num_ranks, body.__module__, body.__name__, arguments, timeout, is_alone=is_alone)
            except pool.Failure as error:
                failure = str(error)
            # Outside the handler and without a traceback: only the traceback of the ranks is useful.
            if failure is not None:
                pytest.fail(failure, pytrace=False)

        run.body_on_a_rank = body  # type: ignore[attr-defined]
        return pytest.mark.ranks(num_ranks)(run)  # type: ignore[no-any-return]

    return decorate


def device() -> torch.device:
    """The device that this rank computes on."""
    return worker.device_here


def plain_tensor() -> type[torch.Tensor]:
    """The ordinary tensor class of that device, without a subclass of a test or of the package."""
    return type(torch.empty(0, device=device()))
