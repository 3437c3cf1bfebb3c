"""Removes names of the user and of the machine from texts, because reports can be public."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from pathlib import Path

__all__ = ["HOST", "ROOT", "without_names"]

ROOT = Path(__file__).resolve().parents[2]
HOST = "host0"  # replaces the name of this machine
# Names that identify nobody. Some of them are also words of messages.
COMMON = {"root", "user", "ubuntu", "admin", "localhost", "docker", "nobody", "runner"}


def without_names(text: str) -> str:
    """The text without folders of the user, without the user name, and without the host name."""
    # `expanduser` keeps the "~" if the user has no home folder.
    for path, word in ((str(ROOT), "."), (sys.prefix, "<python>"), (os.path.expanduser("~"), "~")):
        if len(path) > 1:
            text = text.replace(path, word)
    for name, word in ((socket.gethostname(), HOST), (_user(), "<user>")):
        if len(name) > 2 and name.lower() not in COMMON:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", word, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in some containers the number of the user has no name
        return ""
