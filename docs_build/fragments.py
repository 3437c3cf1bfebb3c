"""One function of the package, found by its name while the site is built."""

from __future__ import annotations

from docs_build.markup import highlight_lines
from docs_build.order import PACKAGE
from docs_build.pages import address, linker
from docs_build.source import find_function, read_module

__all__ = ["fragment"]


def fragment(name: str, qualified: str, start: str) -> str:
    """The code of ``qualified`` in the module ``name``, without its docstring, as HTML for the page ``start``.

    Raises:
        KeyError: there is no such function, so the page is out of date.
    """
    first, last, docstring = find_function(name, qualified)
    module = read_module(name)
    code = highlight_lines(module.text, linker(module, start))
    numbers = [n for n in range(first, last + 1) if not docstring or not docstring[0] <= n <= docstring[1]]
    text = module.text.splitlines()
    depth = min(len(text[n - 1]) - len(text[n - 1].lstrip()) for n in numbers if text[n - 1].strip())
    shown = "\n".join(
        code[n - 1][depth:] if code[n - 1].startswith(" " * depth) else _outdent(code[n - 1], depth) for n in numbers
    )
    where = f"<code>{name}</code>, <code>{qualified}</code>"
    return (
        f'<div class="fragment"><p class="fragment-head"><a href="{address(start, name, qualified)}">{where}</a>'
        f"<span>line {first}</span></p>"
        f'<div class="highlight"><pre><code>{shown}\n</code></pre></div></div>'
    )


def _outdent(line: str, depth: int) -> str:
    """Removes ``depth`` blanks from a highlighted line; they are inside its first element."""
    blanks = " " * depth
    at = line.find(">" + blanks)
    return line if at < 0 else line[: at + 1] + line[at + 1 + depth :]


def exists(name: str) -> bool:
    """Whether the package has this module."""
    return (PACKAGE / name).exists()
