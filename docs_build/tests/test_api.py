"""The API page lists every name that a program can import."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import minifsdp

# The public modules are those of the first level, without ``arguments``, which only checks arguments of public calls,
# and the commands ``__main__`` and ``ledger``, and two modules of the tools.
MODULES = ["minifsdp", *(f"minifsdp.{m.name}" for m in pkgutil.iter_modules(minifsdp.__path__) if not m.ispkg)]
NOT_PUBLIC = ("minifsdp.checks.arguments", "minifsdp.__main__", "minifsdp.ledger")
PUBLIC = [*(name for name in MODULES if name not in NOT_PUBLIC), "minifsdp_tools.cost", "minifsdp_tools.timeline"]


def names_of(name: str) -> list[str]:
    """The public names of a module: its ``__all__``, or else the names in it that the package defines."""
    module = importlib.import_module(name)
    found = [one for one in vars(module) if not one.startswith("_")]
    own = [one for one in found if getattr(vars(module)[one], "__module__", "").startswith("minifsdp")]
    return list(getattr(module, "__all__", own))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_can_be_linked_to_on_the_page(site: Path, module: str) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    anchors = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(minifsdp[\w.]+)"', page)}
    in_tables = set(re.findall(r"<td><code>(\w+)</code></td>", page))
    assert names_of(module)
    assert [name for name in names_of(module) if name not in anchors | in_tables] == []


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_function_with_checked_arguments_has_its_parameters_on_the_page(site: Path, name: str) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = re.sub("<[^>]+>", "", page.partition(f'id="minifsdp.{name}"')[2].partition('<h3 id="')[0])
    signature = re.search(rf"{name}\((.*?)\) -&gt;", text, re.DOTALL)
    assert signature
    assert [one for one in inspect.signature(getattr(minifsdp, name)).parameters if one not in signature[1]] == []
