"""What a chunk of our own runs: ``python -m spec_tests.gpu.piece MODULE DEVICE ARGUMENTS``.

The module's ``work`` yields findings, and each is written down at once: when the process is ended, those before stay.
A finding whose ``outcome`` is ``failed`` has its ``text`` printed, and makes the chunk fail in the end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from spec_tests.gpu import chunks
from spec_tests.gpu.platforms import find

__all__ = ["leave_finding", "main"]


def leave_finding(finding: dict[str, Any]) -> None:
    """Writes one finding into the file of this chunk."""
    with open(os.environ[chunks.FINDINGS], "a") as file:
        file.write(json.dumps(finding) + "\n")


def main(module: str, device: str, arguments: str) -> int:
    """The exit status."""
    failed = False
    work = importlib.import_module(f"spec_tests.gpu.{module}").work
    for finding in work(find(device), **json.loads(arguments)):
        leave_finding(finding)
        if finding.get("outcome") == "failed":
            failed = True
            print(finding["text"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
