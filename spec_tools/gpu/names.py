"""Removes names from outcomes and reports, because reports are public: hosts, users, addresses and paths.

``clean`` replaces the checkout, Python and the home folder in the output of a chunk, and names of this machine and its
user. ``without_names`` replaces what is left in all texts of a report::

    the name of this host               host0
    the name of the user                <user>
    10.0.3.7 and other IPv4 addresses   <address>
    /scratch/job/data/a.py              <path>/a.py

The last part of a path stays, and for an installed package all parts after ``site-packages``. Paths in ``/dev``,
``/proc`` and ``/sys`` are the same on all machines, so they stay. Names such as ``root``, which many machines have,
stay: they do not identify a user, and the same words occur in messages.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["HOST", "ROOT", "clean", "local_names", "without_names"]

ROOT = Path(__file__).resolve().parents[2]
HOST = "host0"  # replaces the name of this machine

COMMON = {
    "localhost", "root", "docker", "runner", "user", "users", "ubuntu", "admin", "nobody", "test", "gpu",
    "node", "cuda", "torch",
}  # fmt: skip
# The first slash begins a path if no word, scheme or replaced folder is before it.
PATH = re.compile(r"(?<![\w:/.~>*)\]-])(?!/(?:dev|proc|sys)/)(?:/|(?:\.\./)+)(?:[\w.+@=-]+/)+")
PACKAGES = re.compile(r".*/(site-packages|dist-packages)/")
OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
ADDRESS = re.compile(rf"(?<![\w.-])(?!127\.|0\.0\.0\.0){OCTET}(?:\.{OCTET}){{3}}(?![\w.])")


def local_names() -> dict[str, str]:
    """The host names and the user name of this machine, each with its replacement; without common words."""
    host = socket.gethostname()
    names = dict.fromkeys((host, host.partition(".")[0]), HOST)
    with suppress(KeyError, OSError, ImportError):  # the user has no name, for example in a container
        names[getpass.getuser()] = "<user>"
    return {name: word for name, word in names.items() if len(name) > 2 and name not in COMMON}


def clean(text: str) -> str:
    """The text without the folders of the user, the user name and the host name."""
    # `expanduser` keeps the "~" if the user has no home folder.
    for path, word in ((str(ROOT), "."), (sys.prefix, "<python>"), (os.path.expanduser("~"), "~")):
        if len(path) > 1:
            text = text.replace(path, word)
    return _replaced(text, local_names())


def without_names(value: Any, names: dict[str, str] | None = None) -> Any:
    """A copy of a JSON value with replaced names in its texts. Keys stay as they are.

    Args:
        value: the report, or a part of it.
        names: names with their replacements; default: `local_names`.
    """
    names = local_names() if names is None else names
    if isinstance(value, dict):
        return {key: without_names(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [without_names(one, names) for one in value]
    return _text(value, names) if isinstance(value, str) else value


def _text(text: str, names: dict[str, str]) -> str:
    text = PATH.sub(
        lambda found: PACKAGES.sub(r"<path>/\1/", found[0]) if PACKAGES.match(found[0]) else "<path>/", text
    )
    return ADDRESS.sub("<address>", _replaced(text, names))


def _replaced(text: str, names: dict[str, str]) -> str:
    for name in _longest_first(names):
        if name in text:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], text)
    return text


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=len, reverse=True)
