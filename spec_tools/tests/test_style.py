"""Plain English: words and patterns that the prose of the project does not use.

The test is a help. It finds some odd sentences, not all of them. A file in `LEFT` may have as many as it has today;
the number can only become smaller.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure

FOLDERS = ("minifsdp", "minifsdp_gloo", "minifsdp_tools", "docs", "tutorials", "spec_tests", "spec_tools", "docs_build")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
WORDS = (
    r"whoever|whom|somebody|nobody|anew|mends?|mended|shall|in vain|so wished|lets? go of|last words|front apis?|told"
    r"|hears?|once more|trip wires?|beside it|for good"
)
# A clause in the place of a noun, or an inverted order; not a question or a title.
CLAUSE = r"(?:^|[.;:] )(?:Who|What|Whom|Of) [a-z]+ (?!is\b|are\b)(?![^.]*\?|[^.\n]*:$)"
ODD = re.compile(rf"\b(?i:{WORDS})\b|{CLAUSE}", re.MULTILINE)
# Odd constructions that are left, by file.
LEFT: dict[str, int] = {
    "docs/spec.md": 1,
    "minifsdp/messages.toml": 1,
}


def prose_of(path: Path) -> str:
    """Docstrings and comments of a module; a page without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|\{\{.*?\}\}|`[^`\n]*`", "", text, flags=re.DOTALL)
    if path.suffix != ".py":
        return text
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return re.sub(r"``[^`]*``|`[^`\n]*`", "", "\n".join(found))


def files() -> list[str]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    prose = [path for path in inside if path.suffix in (".py", ".md", ".toml")]
    return sorted(str(path.relative_to(ROOT)) for path in [*prose, *(ROOT / page for page in PAGES)])


@pytest.mark.parametrize("name", files())
def test_prose_is_plain_english(name: str) -> None:
    found = [match.group().strip() for match in ODD.finditer(prose_of(ROOT / name))]
    assert len(found) <= LEFT.get(name, 0), found


@pytest.mark.parametrize(
    "sentence", ["Who waits gets it.", "It is told what to do.", "Of a layout it touches the leaf.", "Nobody knows."]
)
def test_style_check_finds_unusual_sentences(sentence: str) -> None:
    assert ODD.search(sentence)
