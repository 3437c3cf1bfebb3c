"""Decides which files belong to the package.

The name of a folder is not enough. A checkout can be called ``minifsdp``, and then the path of each of its files
contains that name. So the location of the imported package decides.
"""

from __future__ import annotations

from pathlib import Path

import minifsdp

__all__ = ["is_of_package"]

PACKAGE = Path(minifsdp.__file__).resolve().parent


def is_of_package(path: str) -> bool:
    """Whether the source file ``path`` is a module of minifsdp. False for ``<string>`` and other generated code."""
    return Path(path).resolve().is_relative_to(PACKAGE)
