"""Which files belong to the package.

The name of a folder says nothing: a checkout can be called ``minifsdp``, and then every file of it has that name in its
path. So the location of the imported package decides.
"""

from __future__ import annotations

from pathlib import Path

import minifsdp

__all__ = ["is_of_package"]

PACKAGE = Path(minifsdp.__file__).resolve().parent


def is_of_package(path: str) -> bool:
    """Whether the source file ``path`` is a module of minifsdp. ``<string>`` and other generated code is not."""
    return Path(path).resolve().is_relative_to(PACKAGE)
