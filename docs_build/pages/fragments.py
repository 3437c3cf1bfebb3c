"""One function of the package, found by its name while the site is built."""

import re

from docs_build.pages.modulepage import address, linker
from docs_build.reading.markup import highlight_lines
from docs_build.reading.source import find_function, read_module
from docs_build.templates import PAGES


def fragment(name: str, qualified: str, start: str) -> str:
    """The code of ``qualified`` in the module ``name``, without its docstring, as HTML for the page ``start``.

    Raises:
        KeyError: there is no such function, so the page is out of date.
    """
    first, last, docstring = find_function(name, qualified)
    module = read_module(name)
    code = highlight_lines(module.text, linker(module, start))
    numbers = (n for n in range(first, last + 1) if n not in docstring)
    # The indentation may be inside of the first element of a line.
    head = module.text.splitlines()[first - 1]
    indent = re.compile(rf"^((?:<[^>]*>)?) {{{len(head) - len(head.lstrip())}}}")
    shown = (indent.sub(r"\1", code[n - 1]) for n in numbers)
    return PAGES.fragment(name, qualified, address(start, name, qualified), first, shown)
