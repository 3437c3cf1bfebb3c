"""For the page of the API: a function with checked arguments is documented like the original function.

``minifsdp/arguments.py`` contains ``fully_shard = takes(_fully_shard, ...)``. The reader of the source for the API's
page sees a variable and would show the checks instead of signature and docstring. Configured in ``mkdocs.yml``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Checked"]

TAKES = re.compile(r"takes\(\s*(\w+),")


class Checked(griffe.Extension):
    """Replaces the variable by the function."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called after the whole package has been read."""
        module = pkg["arguments"]
        for name, member in list(module.members.items()):
            found = TAKES.match(str(getattr(member, "value", None)) if not member.is_alias else "")
            if found:
                function = module.members[found[1]].target_path
                module.set_member(name, griffe.Alias(name, function, parent=module))
