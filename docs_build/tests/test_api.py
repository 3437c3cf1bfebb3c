"""The API page lists every name that a program can import."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import minifsdp

# Modules of the first level that are not for programs: commands, and checks of the arguments of public calls.
NOT_PUBLIC = {"minifsdp.checks.arguments", "minifsdp.__main__", "minifsdp.ledger"}
OF_TOOLS = ["minifsdp_tools.cost", "minifsdp_tools.timeline"]


def public_names(name: str) -> set[str]:
    """The ``__all__`` of a module, or else the names in it that the package defines."""
    facts = vars(importlib.import_module(name))
    own = (one for one in facts if not one.startswith("_"))
    return set(facts.get("__all__") or (o for o in own if getattr(facts[o], "__module__", "").startswith("minifsdp")))


def test_every_public_name_can_be_linked_to_on_the_page(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    anchors = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(minifsdp[\w.]+)"', page)}
    in_tables = set(re.findall(r"<td><code>(\w+)</code></td>", page))
    modules = {f"minifsdp.{one.name}" for one in pkgutil.iter_modules(minifsdp.__path__) if not one.ispkg}
    for module in ["minifsdp", *modules - NOT_PUBLIC, *OF_TOOLS]:
        assert public_names(module) - anchors - in_tables == set(), module
