"""The site generator can be replaced: only one module imports it."""

import re

from docs_build.reading.order import ROOT


def test_one_module_imports_the_generator_and_no_other() -> None:
    files = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (ROOT / "docs_build").rglob("*.py")}
    theirs = re.compile(r"^\s*(?:from|import) (?:mkdocs|mkdocstrings|material|zensical)\b", re.MULTILINE)
    users = [name.name for name, text in files.items() if "tests" not in name.parts and theirs.search(text)]
    assert users == ["generator.py"]
