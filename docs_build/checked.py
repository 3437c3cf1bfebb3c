"""For the page of the API: a function whose arguments are looked at first is described as the function that it is.

``minifsdp/arguments.py`` says ``fully_shard = takes(_fully_shard, ...)``. What reads the source for the API's page sees
a variable there, and would show the table of checks instead of signature and docstring. Named in ``mkdocs.yml``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Checked"]

TAKES = re.compile(r"takes\(\s*(\w+),")


class Checked(griffe.Extension):
    """Puts the function in the variable's place."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when the whole package was read."""
        module = pkg["arguments"]
        for name, member in list(module.members.items()):
            found = TAKES.match(str(getattr(member, "value", None)) if not member.is_alias else "")
            if found:
                function = module.members[found[1]].target_path
                module.set_member(name, griffe.Alias(name, function, parent=module))
