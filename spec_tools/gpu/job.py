"""The program of a job: ``python -m spec_tools.gpu.job MODULE DEVICE ARGUMENTS``.

``work`` of the module yields *findings*, dictionaries of JSON values. Each is written at once, so that it remains if
the process is ended. If a finding has a ``text``, it describes a failure; it is printed, and the job fails at its end.

The ranks are those of the tests, ``spec_tests.harness.pool``. The pool selects the device and the backend, lets ranks
share a GPU if there are too few, and has a time limit, after which it reports the stacks of ranks that hang. This
process itself does not train, so a crash of a rank is the failure of one finding.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.harness import device, pool
from spec_tools.gpu.process import FINDINGS

Finding = dict[str, Any]


def main(module: str, kind: str, arguments: str) -> int:
    """Runs ``work`` of the module; returns the exit status."""
    pool.start_early()
    pool.use_device(kind)
    pool.use_filters(["ignore::FutureWarning"])  # torch 2.13 has new names for its collectives
    failed = False
    for finding in importlib.import_module(f"spec_tools.gpu.{module}").work(**json.loads(arguments)):
        leave_finding(finding)
        if "text" in finding:
            failed = True
            print(finding["text"])
    return int(failed)


def leave_finding(finding: Finding) -> None:
    """Writes one finding into the file of this job."""
    with open(os.environ[FINDINGS], "a") as file:
        file.write(json.dumps(finding) + "\n")


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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
