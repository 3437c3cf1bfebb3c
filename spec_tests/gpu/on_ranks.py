"""Runs a function on several ranks, and brings back what each has returned.

The ranks are those of the tests, ``spec_tests.harness.pool``: with the device, the backend, several ranks on one GPU
where there are too few, a limit, and the stacks of those that hang.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spec_tests.gpu.platforms import Platform
from spec_tests.harness import pool

__all__ = ["on_ranks"]


def on_ranks(platform: Platform, num_ranks: int, body: Callable[..., Any], limit: float, **arguments: Any) -> list[Any]:
    """By rank: what ``body``, a function at the top of its module, has returned; it must fit into JSON.

    Raises:
        pool.Failure: a rank raised, died or hung; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pool.use_device(platform.name)
        pool.use_filters(["ignore::FutureWarning"])  # torch 2.13 has new names for its collectives
        call = {"module": body.__module__, "name": body.__name__, "folder": folder, "arguments": arguments}
        pool.run(num_ranks, __name__, _call.__name__, call, limit)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]


def _call(module: str, name: str, folder: str, arguments: dict[str, Any]) -> None:
    result = getattr(importlib.import_module(module), name)(**arguments)
    Path(folder, str(dist.get_rank())).write_text(json.dumps(result))


# The pool looks for the body of a test under this name.
_call.body_on_a_rank = _call  # type: ignore[attr-defined]
