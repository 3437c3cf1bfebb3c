"""The size of the packages and of torch's FSDPs, in statements and tokens.

Code lines depend on formatting: one line can hold one token or twenty. Statements and tokens do not. Docstrings,
comments and type annotations are not counted. An assignment of a tuple to a tuple counts once for each name, because
it could be written on as many lines.

Example: ``a, b = 1, 2`` is one code line, two statements and seven tokens.

``python -m spec_tools.size`` prints the table. `spec_tools/tests/test_house_rules.py` compares it with limits, and
`docs_build/tests/test_readme.py` with the README.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch.distributed.fsdp as torch_fsdp

PACKAGE = Path(__file__).resolve().parents[1] / "minifsdp"
BESIDE = (PACKAGE.with_name("minifsdp_gloo"), PACKAGE.with_name("minifsdp_tools"))
TORCH = Path(torch_fsdp.__file__).parent
CASES_AND_CHECKS = frozenset({"cases", "checks", "watchdog", "debugging"})
NAMES_OF_NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
NOT_CODE = {getattr(tokenize, name) for name in NAMES_OF_NO_CODE}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """The size of several files.

    Attributes:
        statements: number of statements.
        tokens: number of tokens.
        lines: number of code lines, which are neither blank nor a comment nor a docstring.
    """

    statements: int = 0
    tokens: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Size(*map(sum, pairs))


def size_of(files: Iterable[Path]) -> Size:
    """The size of all ``files`` together."""
    return sum((size_of_text(file.read_text(encoding="utf-8")) for file in files), Size())


def size_of_text(text: str) -> Size:
    """The size of source code."""
    lines = code_lines(text)
    tree = _without_prose(ast.parse(text))
    statements = sum(map(_weight, ast.walk(tree)))
    return Size(statements, len(_tokens(ast.unparse(tree))), len(lines))


def code_lines(text: str) -> set[int]:
    """Numbers of lines with code: not blank, not a comment, not a docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if _is_docstring(node):
            prose.update(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in _tokens(text):
        lines.update(range(token.start[0], token.end[0] + 1))
    return lines - prose


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in found if token.type not in NOT_CODE]


def _is_docstring(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _without_prose(tree: ast.Module) -> ast.Module:
    """The tree without docstrings and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and _is_docstring(node.body[0]):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.fix_missing_locations(_Unannotated().visit(tree))


class _Unannotated(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.Expr(ast.Constant(0))
        return ast.Assign(targets=[node.target], value=node.value)


def _weight(node: ast.AST) -> int:
    """The number of statements that a node counts for."""
    if not isinstance(node, ast.stmt):
        return 0
    is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    if is_tuple and isinstance(node.targets[0], ast.Tuple):
        return len(node.targets[0].elts)
    return 1


def imported_by(start: Path, without: frozenset[str] = frozenset()) -> set[Path]:
    """The modules of the package that ``start`` imports, directly or indirectly, and ``start`` itself.

    Args:
        start: a module of the package.
        without: folders whose modules are left out, with what only they import.
    """
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file in found or file.parent.name in without:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                waiting += filter(None, map(_file_of, names))
    return found


def _file_of(name: str) -> Path | None:
    """The file of a module of the package; ``None`` for other names."""
    first, *rest = name.split(".")
    if first != "minifsdp" or not rest:
        return None
    path = PACKAGE.joinpath(*rest)
    candidates = [path.with_suffix(".py"), path / "__init__.py"]
    return next((file for file in candidates if file.exists()), None)


@functools.cache
def sizes() -> dict[str, Size]:
    """The rows of the table."""
    fully_shard = PACKAGE / "fsdp2/fully_shard.py"
    return {
        "minifsdp, minifsdp_gloo and minifsdp_tools": size_of(
            path for package in (PACKAGE, *BESIDE) for path in package.rglob("*.py")
        ),
        "minifsdp": size_of(PACKAGE.rglob("*.py")),
        "minifsdp: fully_shard and all that it imports": size_of(imported_by(fully_shard)),
        "minifsdp: the same without cases and checks": size_of(imported_by(fully_shard, CASES_AND_CHECKS)),
        "torch: FSDP1 and FSDP2": size_of(TORCH.rglob("*.py")),
        "torch: fully_shard": size_of((TORCH / "_fully_shard").rglob("*.py")),
    }


def main() -> None:
    """Prints the table."""
    print(f"{'':48}{'statements':>11}{'tokens':>9}{'lines':>8}{'tokens/line':>13}")
    for name, size in sizes().items():
        density = size.tokens / size.lines
        print(f"{name:48}{size.statements:11,}{size.tokens:9,}{size.lines:8,}{density:13.1f}")


if __name__ == "__main__":
    main()
