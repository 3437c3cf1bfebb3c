"""Stages and chunks of the GPU kit for tests, and a kit in a test's folder."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_tools.gpu.__main__ import Kit
from spec_tools.gpu.chunks import Chunk
from spec_tools.gpu.platforms import CPU
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import Settings, Stage


def python(name: str, program: str, limit: float = 60.0) -> Chunk:
    """A chunk that runs a program, which may be indented."""
    return Chunk(name, [sys.executable, "-c", textwrap.dedent(program)], limit)


def stage(name: str, *chunks: Chunk, is_vital: bool = False, layer: str = "") -> Stage:
    """A stage with these chunks."""
    return Stage(name, "is it so", lambda settings: list(chunks), is_vital, layer)


@contextmanager
def kit_in(folder: Path) -> Iterator[Kit]:
    """A kit for the CPU that writes all of its files into ``folder``."""
    kit = Kit(Settings(CPU, folder / "run"), Progress(folder / "run", {}), folder / "report.md")
    try:
        yield kit
    finally:
        kit.progress.close()
