"""A module's text, split into rows: prose for the left column, code for the right one.

A row begins at a top-level statement, at a class, at a method, and inside a function at each comment that stands alone
above a statement. Docstrings and such comments go to the left column, and all other text to the right one.

Every row has an anchor. The anchor of a function is its qualified name (``Unit.wait``). A row inside of it has a number
(``Unit.wait-2``), so links survive edits elsewhere in the file. A note (``notebook.py``) also begins a row. Notes have
numbers of their own (``Unit.wait-n1``), so a new note does not change other anchors.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise

from docs_build.reading.definitions import docstring_lines, find, first_line
from docs_build.reading.notebook import notes_of, place_notes
from docs_build.reading.order import path_of
from docs_build.reading.tracing import recording_lines

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
        """The anchor of the row with a line, or ``""``. Rows of notes are skipped, because records outlive them."""
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
        package, *folders = (node.module or "").split(".")
        folder = "/".join(folders if package == "minifsdp" else [package, *folders])
        for alias in node.names:
            places = {f"{folder}/{alias.name}.py": "", f"{folder}.py": alias.name, f"{folder}/__init__.py": alias.name}
            known = ((name.strip("/"), inside) for name, inside in places.items())
            found[alias.asname or alias.name] = next(one for one in known if path_of(one[0]).exists())
    return found


class _Cutter:
    """Finds the starts of rows and the lines that are prose."""

    def __init__(self, text: str, tree: ast.Module, notes: dict[int, str]) -> None:
        self.lines = text.splitlines()
        self.tree, self.notes = tree, notes
        self.prose: set[int] = set()
        self.starts: dict[int, Row] = {}
        # Comment lines without code.
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {
            token.start[0]: token.string
            for token in tokens
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        }

    def rows(self) -> list[Row]:
        self._drop_docstring(self.tree)
        self._place_definitions()
        self._place_comments()
        for line, note in sorted(self.notes.items()):
            self._step(line, "n").note = note
        order = sorted(self.starts)
        for start, end in pairwise([*order, len(self.lines) + 1]):
            numbers = [n for n in range(start, end) if n not in self.prose]
            filled = [n for n in numbers if self.lines[n - 1].strip()]
            self.starts[start].lines = [n for n in numbers if filled[0] <= n <= filled[-1]] if filled else []
        return [self.starts[start] for start in order]

    def _drop_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
        lines = docstring_lines(node)
        self.prose.update(lines)
        # Also remove the blank line after the docstring.
        if lines and lines.stop <= len(self.lines) and not self.lines[lines.stop - 1].strip():
            self.prose.add(lines.stop)
        return ast.get_docstring(node) or ""

    def _begin(self, node: ast.stmt, kind: str, name: str, anchor: str = "") -> None:
        """Begins a row at a statement; anchors that are taken get a number."""
        anchor, number, taken = anchor or name, 2, {row.anchor for row in self.starts.values()}
        candidate = anchor
        while candidate in taken:
            candidate, number = f"{anchor}-{number}", number + 1
        docstring = self._drop_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""
        self.starts[first_line(node)] = Row(candidate, kind, name, docstring)

    def _place_definitions(self) -> None:
        in_head = True
        # The last definition with a name has the anchor; those before it are overloads for type checkers.
        functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        for node in self.tree.body:
            if first_line(node) in self.prose:
                continue
            targets = _targets(node)
            in_head = in_head and (isinstance(node, ast.Import | ast.ImportFrom) or targets == ["__all__"])
            if in_head:
                if not self.starts:
                    self._begin(node, "imports", "imports")
            elif isinstance(node, ast.ClassDef):
                self._begin(node, "class", node.name)
                for item in node.body:
                    if isinstance(item, ast.FunctionDef):
                        self._begin(item, "method", item.name, f"{node.name}.{item.name}")
            elif isinstance(node, ast.FunctionDef):
                is_last = node is functions[node.name]
                anchor = "" if is_last else f"{node.name}-overload"
                self._begin(node, "function" if is_last else "data", node.name, anchor)
            else:
                # No function can have this name, so the anchor is unique.
                self._begin(node, "data", (targets or ["top-level"])[0])

    def _place_comments(self) -> None:
        """Moves comments above a statement to the left column."""
        statements = {first_line(node) for node in ast.walk(self.tree) if isinstance(node, ast.stmt)}
        for _, lines in groupby(enumerate(sorted(self.comments)), lambda pair: pair[1] - pair[0]):
            group = [line for _, line in lines]
            last, texts = self.comments[group[-1]], [self.comments[line] for line in group]
            below = (n for n in range(group[-1] + 1, len(self.lines) + 1) if self.lines[n - 1].strip())
            following = next(below, 0)
            if banner := BANNER.match(last):
                self.starts[group[0]] = Row(f"part-{_slug(banner[1])}", "banner", banner[1])
            elif following in statements and not last.startswith(("# type:", "# noqa")):
                comment = "\n".join(text.removeprefix("#").removeprefix(" ") for text in texts)
                self._step(following).comment = comment
            else:
                continue
            self.prose.update(group)

    def _step(self, line: int, mark: str = "") -> Row:
        """The row that begins at a line; if there is none, a new one with the number of its owner's steps."""
        if line not in self.starts:
            above = max(n for n, row in self.starts.items() if n <= line and row.kind not in ("step", "banner"))
            owner = f"{self.starts[above].anchor}-{mark}"
            numbered = re.compile(re.escape(owner) + r"\d+")
            number = sum(bool(numbered.fullmatch(row.anchor)) for row in self.starts.values())
            self.starts[line] = Row(f"{owner}{number + 1}", "step")
        return self.starts[line]


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement assigns."""
    targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def find_function(name: str, qualified: str) -> tuple[int, int, range]:
    """First and last line of a class, method or function, and the lines of its docstring.

    Raises:
        KeyError: the module has no definition with that name.
    """
    node = find(ast.parse(path_of(name).read_text(encoding="utf-8")), qualified)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise KeyError(f"{name} has no {qualified}")
    return first_line(node), node.end_lineno or node.lineno, docstring_lines(node)
