"""Rules for all packages: small files, a complete list of modules, one vocabulary, and limits on the code size.

A number here is a limit. Lower it if the package becomes smaller. If you raise it, give the reason in the commit.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from spec_tools.size import BESIDE, PACKAGE, Size, size_of, size_of_text, sizes

ROOT = PACKAGE.parent
# A module of minifsdp by its path inside the package, a module of another package with the name of the package.
MODULES = [
    *sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for package in BESIDE for path in package.rglob("*.py")),
]

pytestmark = pytest.mark.pure

# Limits on the size of the packages, in statements and tokens, with room for 5 % more than the size of 2026-11-29.
# `python -m spec_tools.size` prints the present size.
LARGEST = {
    "minifsdp, minifsdp_gloo and minifsdp_tools": Size(statements=11_200, tokens=121_300),
    "minifsdp": Size(statements=8_790, tokens=90_000),
    "minifsdp: fully_shard and all that it imports": Size(statements=4_750, tokens=46_000),
    "minifsdp: the same without cases and checks": Size(statements=2_095, tokens=19_250),
}
# In statements. At most four files have more than 200, and none has more than 266.
LARGEST_FILE = 266
LARGE_FILE = 200
NUM_LARGE_FILES = 4
LARGEST_FUNCTION = 36  # in statements
# Words for which PyTorch has other terms, and words for people where ranks, users and modules are meant.
BANNED = (
    r"\b(main road|trouble|loan|lent|roll call|roll_call|sentence|own code|own_code|animal|"
    r"somebody|nobody(?!-to-shard-with)|his|he)\b"
)
# A module that is only an import path has no comparison with torch.
PATHS = {"api.py", "checkpoint_wrapper.py", "sharded_grad_scaler.py", "wrap.py"}


def path_of(module: str) -> Path:
    return (ROOT if module.startswith(tuple(package.name for package in BESIDE)) else PACKAGE) / module


def text_of(module: str) -> str:
    return path_of(module).read_text(encoding="utf-8")


@pytest.mark.parametrize("what", LARGEST)
def test_package_is_within_its_limit(what: str) -> None:
    size = sizes()[what]
    assert size.statements <= LARGEST[what].statements
    assert size.tokens <= LARGEST[what].tokens


FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")} | set(BESIDE))
TOKENS_PER_LINE = 8.0


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_lines_of_a_folder_are_short(folder: Path) -> None:
    size = size_of(sorted(folder.rglob("*.py")))
    assert size.tokens <= TOKENS_PER_LINE * size.lines


def core_modules() -> list[str]:
    text = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    return re.findall(r"`([\w/]+\.py)`", text.partition("* [core]")[2].partition("\n* ")[0])


def test_core_does_not_import_the_other_parts() -> None:
    others = re.compile(r"(from|import) minifsdp(\.checkpoint|\.compat|\.debugging|_gloo|_tools)\b")
    assert [module for module in core_modules() if others.search(text_of(module))] == []


def test_modules_have_few_statements() -> None:
    sizes_of_files = {module: size_of([path_of(module)]).statements for module in MODULES}
    large = {module: size for module, size in sizes_of_files.items() if size > LARGE_FILE}
    assert len(large) <= NUM_LARGE_FILES, large
    assert max(large.values()) <= LARGEST_FILE, large


@pytest.mark.parametrize("module", MODULES)
def test_function_has_few_statements(module: str) -> None:
    for node in ast.walk(ast.parse(text_of(module))):
        if isinstance(node, ast.FunctionDef):
            assert size_of_text(ast.unparse(node)).statements <= LARGEST_FUNCTION, node.name


@pytest.mark.parametrize("module", [*MODULES, "messages.toml"])
def test_vocabulary_is_that_of_pytorch(module: str) -> None:
    lines = enumerate(text_of(module).splitlines(), 1)
    assert [f"line {number}: {line.strip()}" for number, line in lines if re.search(BANNED, line, re.IGNORECASE)] == []


def test_layers_on_the_map_equal_those_of_the_import_contract() -> None:
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = {
        module.removeprefix("minifsdp.").replace(".", "/") + ("" if "." in module[9:] else "/"): number
        for number, layer in enumerate(reversed(contract["layers"]), 1)
        for module in layer.split(" | ")
    }
    drawn: dict[str, int] = {}
    for number, named in re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "modules.md").read_text(), re.MULTILINE):
        drawn.update((name, int(number)) for name in re.findall(r"`([\w/]+)(?:\.py)?`", named))
    known = {name: number for name, number in floors.items() if name in drawn or name.startswith("engine/")}
    assert drawn | known == drawn


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__init__.py")])
def test_every_module_is_on_the_map_with_the_behaviour_of_torch(module: str) -> None:
    named = re.findall(r"`([\w/*]+\.py)`", (ROOT / "docs" / "modules.md").read_text(encoding="utf-8"))
    assert any(re.fullmatch(name.replace(".", r"\.").replace("*", r"\w*"), module) for name in named)
    assert module in PATHS or "*In torch:*" in text_of(module)
