"""Runs a function on several ranks, and returns the results of all ranks.

It uses the ranks of the tests, ``spec_tests.harness.pool``. The pool selects the device and the backend, lets ranks
share a GPU if there are too few, and has a time limit, after which it records the stacks of ranks that hang.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spec_tests.harness import pool
from spec_tools.gpu.chunks import examined_before
from spec_tools.gpu.platforms import Platform

__all__ = ["on_ranks"]


def on_ranks(platform: Platform, num_ranks: int, body: Callable[..., Any], limit: float, **arguments: Any) -> list[Any]:
    """The results of ``body`` by rank. ``body`` must be a top-level function and return JSON-compatible values.

    Raises:
        pool.Failure: a rank raised, died or hung; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pool.use_device(platform.name)
        pool.use_filters(["ignore::FutureWarning"])  # torch 2.13 has new names for its collectives
        call = {"module": body.__module__, "name": body.__name__, "folder": folder, "arguments": arguments}
        with examined_before(limit):
            pool.run(num_ranks, __name__, _call.__name__, call, limit)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]


def _call(module: str, name: str, folder: str, arguments: dict[str, Any]) -> None:
    result = getattr(importlib.import_module(module), name)(**arguments)
    Path(folder, str(dist.get_rank())).write_text(json.dumps(result))


# The pool expects the body of a test in this attribute.
_call.body_on_a_rank = _call  # type: ignore[attr-defined]
