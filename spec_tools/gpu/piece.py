"""The program of a chunk that does not run pytest: ``python -m spec_tools.gpu.piece MODULE DEVICE ARGUMENTS``.

The module's ``work`` yields findings. Each is written at once, so that earlier findings remain if the process is ended.
If the ``outcome`` of a finding is ``failed``, its ``text`` is printed, and the chunk fails at the end.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import sys
from multiprocessing import forkserver
from typing import Any

from spec_tools.gpu import chunks

__all__ = ["leave_finding", "main"]


def leave_finding(finding: dict[str, Any]) -> None:
    """Writes one finding into the file of this chunk."""
    with open(os.environ[chunks.FINDINGS], "a") as file:
        file.write(json.dumps(finding) + "\n")


def main(module: str, device: str, arguments: str) -> int:
    """Runs ``work`` of the module; returns the exit status."""
    # The server of the ranks imports torch while this process does the same, which saves seconds.
    mp.get_context("forkserver").set_forkserver_preload(["spec_tests.harness.worker"])
    forkserver.ensure_running()
    from spec_tools.gpu.platforms import find

    failed = False
    work = importlib.import_module(f"spec_tools.gpu.{module}").work
    for finding in work(find(device), **json.loads(arguments)):
        leave_finding(finding)
        if finding.get("outcome") == "failed":
            failed = True
            print(finding["text"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
