"""The tasks as tests of pytest, so that one process with one set of pools runs tasks and tests.

``work`` of a module returns a *finding*, a dictionary of JSON values: the ``table`` rows of its stage, and a ``text``
if it has failed. The ranks are those of the tests, ``spec_tests.harness.pool``. The pool selects the device and the
backend, lets ranks share a GPU if there are too few, and has a time limit, after which it reports the stacks of ranks
that hang.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import device, pool

Finding = dict[str, Any]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has new names for its collectives
def test_task(stage: str, arguments: dict[str, Any], request: pytest.FixtureRequest) -> None:
    finding = request.node.stash[FINDING] = importlib.import_module(f"spec_tools.gpu.{stage}").work(**arguments)
    if "text" in finding:
        pytest.fail(finding["text"], pytrace=False)


FINDING = pytest.StashKey[Finding]()


def on_ranks(num_ranks: int, body: Callable[..., Any], limit: float, **arguments: Any) -> list[Any]:
    """The results of ``body`` by rank. ``body`` must be a top-level function and return JSON values.

    Raises:
        pool.Failure: a rank raised, died or did not answer within ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = {"module": body.__module__, "name": body.__name__, "folder": folder, "arguments": arguments}
        pool.run(num_ranks, __name__, _call.__name__, call, limit)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]


def _call(module: str, name: str, folder: str, arguments: dict[str, Any]) -> None:
    result = getattr(importlib.import_module(module), name)(**arguments)
    Path(folder, str(dist.get_rank())).write_text(json.dumps(result))


# The pool expects the body of a test in this attribute.
_call.body_on_a_rank = _call  # type: ignore[attr-defined]


def device_module() -> Any:
    """The module of this rank's device type, for example ``torch.cuda``."""
    return torch.get_device_module(device())


def first_error(text: str) -> str:
    """The line with the exception: pytest marks it with an E, and a Python traceback ends with it.

    The pool of ranks has lines of its own for ranks that hang or die. They come first, because the other ranks can
    raise an exception as a result.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("hang: ", "the process died: "))]
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (named + marked + lines[-1:] + ["it has written nothing"])[0]
