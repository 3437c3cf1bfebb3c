"""The page "Where torch is wrong": programs of ``spec_tools/torch_is_wrong``, and the output of each.

The site build runs none of them. Their docstrings contain their output, and tests compare it.
"""

from docs_build.reading.markup import highlight_lines, to_markdown
from docs_build.templates import PAGES
from spec_tools.torch_is_wrong import Case, cases


def find(name: str) -> Case:
    """A case by the name of its program.

    Raises:
        KeyError: there is no case with that name.
    """
    return {case.name: case for case in cases()}[name]


def prose(case: Case) -> str:
    """The error of torch, and the output of both sides, as Markdown."""
    parts = [
        f"### {to_markdown(case.title)} {{ #{case.name} }}",
        to_markdown(case.prose),
        f"torch {case.version}:",
        f"```text\n{case.in_torch}\n```",
        *([f"torch {case.right_since}:", f"```text\n{case.in_fixed_torch}\n```"] if case.right_since else []),
        "With minifsdp instead:",
        f"```text\n{case.in_minifsdp}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def program(case: Case) -> str:
    """The program as a folded block of HTML."""
    ranks = "" if case.num_ranks == 2 else f", on {case.num_ranks} ranks"
    file = f"spec_tools/torch_is_wrong/{case.name}.py"
    return PAGES.program(f"The program{ranks}", file, highlight_lines(case.code))
