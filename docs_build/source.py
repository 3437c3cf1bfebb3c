"""A module's text, split into rows: prose for the left column, code for the right one.

A row begins at a top-level statement, at a class, at a method, and inside a function at each comment that stands alone
above a statement. Docstrings and such comments go to the left, all other text stays.

Every row has an anchor. That of a function is its qualified name (``Unit.wait``), a row inside of it adds a number
(``Unit.wait-2``), so links survive edits elsewhere in the file. A note (``notebook.py``) also begins a row. Notes have
numbers of their own (``Unit.wait-n1``), so a new note does not change other anchors.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache

from docs_build.notebook import notes_of, place_notes
from docs_build.order import PACKAGE, path_of
from docs_build.tracing import recording_lines

__all__ = ["Module", "Row", "find_function", "read_module"]

BANNER = re.compile(r"^#\s*-{2,}\s*(.*?)\s*-{2,}$")


@dataclass
class Row:
    """One row of a page.

    Attributes:
        anchor: unique on the page.
        kind: ``"imports"``, ``"class"``, ``"function"``, ``"method"``, ``"step"``, ``"data"`` or ``"banner"``.
        name: name of the definition, without its class; empty for a step.
        docstring: of the definition.
        comment: lines above the code, without ``#``.
        note: text from `notes/`.
        lines: numbers of the code lines, from 1.
    """

    anchor: str
    kind: str
    name: str = ""
    docstring: str = ""
    comment: str = ""
    note: str = ""
    lines: list[int] = field(default_factory=list)


@dataclass
class Module:
    """A module and its rows.

    Attributes:
        name: path inside the package, or of a tutorial.
        essay: the module's docstring.
        text: the whole text.
        rows: in order.
        imported: names imported from the package: name to (module, attribute or ``""``).
        defined: top-level names that have a row of their own.
        recording: numbers of the lines that only record.
    """

    name: str
    essay: str
    text: str
    rows: list[Row]
    imported: dict[str, tuple[str, str]]
    defined: set[str]
    recording: set[int]

    def anchor_of(self, line: int) -> str:
        """The anchor of the row that contains a line, without notes, which records outlive; empty above all rows."""
        lasting = [row for row in self.rows if row.lines and (row.kind != "step" or row.comment)]
        return next((row.anchor for row in reversed(lasting) if row.lines[0] <= line), "")

    @property
    def title(self) -> str:
        """The first sentence of the essay, without its full stop."""
        return " ".join(self.essay.split("\n\n")[0].split()).rstrip(".")


@cache
def read_module(name: str) -> Module:
    """Reads ``name``, a path inside the package or of a tutorial, and splits it into rows."""
    text = path_of(name).read_text(encoding="utf-8")
    tree = ast.parse(text)
    rows = _Cutter(text, tree, place_notes(text, tree, notes_of(name))).rows()
    defined = {row.name for row in rows if row.kind in ("class", "function", "data")}
    return Module(name, ast.get_docstring(tree) or "", text, rows, _imported(tree), defined, recording_lines(tree))


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("minifsdp"):
            continue
        base = (node.module or "").split(".")[1:]
        for alias in node.names:
            as_module = "/".join([*base, alias.name]) + ".py"
            as_package = "/".join([*base, "__init__"]) + ".py"
            local = alias.asname or alias.name
            if (PACKAGE / as_module).exists():
                found[local] = (as_module, "")
            elif base and (PACKAGE / ("/".join(base) + ".py")).exists():
                found[local] = ("/".join(base) + ".py", alias.name)
            elif not base:
                found[local] = ("__init__.py", alias.name)
            elif (PACKAGE / as_package).exists():
                found[local] = (as_package, alias.name)
    return found


class _Cutter:
    """Finds the starts of rows and the lines that are prose."""

    def __init__(self, text: str, tree: ast.Module, notes: dict[int, str]) -> None:
        self.lines = text.splitlines()
        self.tree, self.notes = tree, notes
        self.comments = self._lonely_comments(text)
        self.statements = {_first_line(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}
        self.prose: set[int] = set()
        self.starts: dict[int, Row] = {}

    @staticmethod
    def _lonely_comments(text: str) -> dict[int, str]:
        """Comment lines without code, by line number."""
        found = {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                found[token.start[0]] = token.string
        return found

    def rows(self) -> list[Row]:
        self._drop_docstring(self.tree)
        self._top_level()
        self._place_comments()
        self._place_notes()
        return self._assemble()

    def _drop_docstring(self, node: ast.AST) -> str:
        docstring = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        if docstring:
            first = node.body[0]  # type: ignore[attr-defined]
            # Also remove the blank line after the docstring.
            blank = first.end_lineno < len(self.lines) and not self.lines[first.end_lineno].strip()
            self.prose.update(range(first.lineno, first.end_lineno + 1 + blank))
        return docstring

    def _top_level(self) -> None:
        in_head, last_kind = True, ""
        for node in self.tree.body:
            line = _first_line(node)
            if line in self.prose:
                continue
            is_head = isinstance(node, ast.Import | ast.ImportFrom) or _targets(node) == ["__all__"]
            if in_head and is_head:
                if last_kind != "imports":
                    self.starts[line] = Row("imports", "imports", "imports")
                last_kind = "imports"
                continue
            in_head = in_head and is_head
            if isinstance(node, ast.ClassDef):
                self._class(node)
                last_kind = "class"
            elif isinstance(node, ast.FunctionDef):
                # The last definition with that name has the anchor; those before it are overloads for type checkers.
                is_overload = node is not self._last(node.name)
                anchor = self._free(f"{node.name}-overload") if is_overload else node.name
                kind = "data" if is_overload else "function"
                self.starts[line] = Row(anchor, kind, node.name, self._drop_docstring(node))
                last_kind = "function"
            else:
                # No function can have this name, so the anchor is unique.
                name = (_targets(node) or ["top-level"])[0]
                self.starts[line] = Row(self._free(name), "data", name)
                last_kind = "data"

    def _last(self, name: str) -> ast.FunctionDef:
        return [n for n in self.tree.body if isinstance(n, ast.FunctionDef) and n.name == name][-1]

    def _free(self, anchor: str) -> str:
        taken = {row.anchor for row in self.starts.values()}
        number = 2
        candidate = anchor
        while candidate in taken:
            candidate, number = f"{anchor}-{number}", number + 1
        return candidate

    def _class(self, node: ast.ClassDef) -> None:
        self.starts[_first_line(node)] = Row(self._free(node.name), "class", node.name, self._drop_docstring(node))
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                anchor = self._free(f"{node.name}.{item.name}")
                self.starts[_first_line(item)] = Row(anchor, "method", item.name, self._drop_docstring(item))

    def _place_comments(self) -> None:
        """Moves comments above a statement to the left column; each begins a row, unless one begins there already."""
        owner_at = sorted(self.starts)
        counts: dict[str, int] = {}
        group: list[int] = []
        for line in sorted(self.comments):
            group = group + [line] if group and line == group[-1] + 1 else [line]
            following = line + 1
            if following in self.comments:
                continue
            while following <= len(self.lines) and not self.lines[following - 1].strip():
                following += 1
            banner = BANNER.match(self.comments[line])
            if banner:
                self.prose.update(group)
                self.starts[group[0]] = Row(f"part-{_slug(banner[1])}", "banner", banner[1])
                continue
            if following not in self.statements or self.comments[line].startswith(("# type:", "# noqa")):
                continue
            self.prose.update(group)
            text = "\n".join(self.comments[n].removeprefix("#").removeprefix(" ") for n in group)
            if following not in self.starts:
                owner = self.starts[max(start for start in owner_at if start <= following)].anchor
                counts[owner] = counts.get(owner, 0) + 1
                self.starts[following] = Row(f"{owner}-{counts[owner]}", "step")
            self.starts[following].comment = text

    def _place_notes(self) -> None:
        """Begins a row at a note, unless one begins there already."""
        counts: dict[str, int] = {}
        for line in sorted(self.notes):
            if line not in self.starts:
                above = max(start for start, row in self.starts.items() if start <= line and row.kind != "step")
                owner = self.starts[above].anchor
                counts[owner] = counts.get(owner, 0) + 1
                self.starts[line] = Row(f"{owner}-n{counts[owner]}", "step")
            self.starts[line].note = self.notes[line]

    def _assemble(self) -> list[Row]:
        order = sorted(self.starts)
        if not order:
            return []
        for start, end in zip(order, [*order[1:], len(self.lines) + 1], strict=True):
            numbers = [n for n in range(start, end) if n not in self.prose]
            while numbers and not self.lines[numbers[-1] - 1].strip():
                numbers.pop()
            while numbers and not self.lines[numbers[0] - 1].strip():
                numbers.pop(0)
            self.starts[start].lines = numbers
        return [self.starts[start] for start in order]


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", None)
    return min(d.lineno for d in decorators) if decorators else node.lineno


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def find_function(name: str, qualified: str) -> tuple[int, int, tuple[int, int] | None]:
    """First and last line of a class, method or function, and the lines of its docstring, if any.

    Raises:
        KeyError: the module has no definition with that name.
    """
    node: ast.AST = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    for part in qualified.split("."):
        inside = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == part]
        if not inside:
            raise KeyError(f"{name} has no {qualified}")
        node = inside[-1]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    docstring = None
    if ast.get_docstring(node):
        docstring = (node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno)
    return _first_line(node), node.end_lineno or node.lineno, docstring
