"""``-m spec_tools.tests.failing_nodes FAULT RANK OPTIONS``: ``spec_tools.gpu.nodes`` with a rank that fails."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterator

from spec_tools.gpu.node_stages import Finding, Mark, NodeStage, Place, look, send
from spec_tools.gpu.nodes import main
from spec_tools.gpu.platforms import Platform


def fail(fault: str, rank: int, platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """All ranks run collectives, except the one that fails before them."""
    mark("the begin")
    if place.rank == rank and fault == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if place.rank == rank and fault == "its parent dies":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == rank and fault == "hangs":
        sleep_for_ever()
    yield from send(platform, place, mark, quick)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    fault, rank, *options = sys.argv[1:]
    body = functools.partial(fail, fault, int(rank))
    stages = (NodeStage("hardware", look, 120.0, is_vital=True), NodeStage("collectives", body, 30.0, is_vital=True))
    sys.exit(main((*stages, NodeStage("smoke", send, 30.0)), options))
