"""The page "Where torch is wrong": programs of ``spec_tests/torch_is_wrong``, and the output of each.

The site build runs none of them. Their docstrings contain their output, and tests compare it.
"""

from __future__ import annotations

from docs_build.markup import highlight_lines, to_markdown
from spec_tests.torch_is_wrong import Case, cases

__all__ = ["find", "program", "prose"]


def find(name: str) -> Case:
    """A case by the name of its program.

    Raises:
        KeyError: there is no case with that name.
    """
    return {case.name: case for case in cases()}[name]


def prose(case: Case) -> str:
    """The error of torch, and the output of both sides, as Markdown."""
    versions = " and ".join(case.versions)
    parts = [
        f"### {to_markdown(case.title)} {{ #{case.name} }}",
        to_markdown(case.prose),
        f"torch {versions}:",
        f"```text\n{case.in_torch}\n```",
        "With minifsdp instead:",
        f"```text\n{case.in_minifsdp}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def program(case: Case) -> str:
    """The program as a folded block of HTML."""
    code = "\n".join(highlight_lines(case.code))
    where = f"spec_tests/torch_is_wrong/{case.name}.py"
    ranks = "" if case.num_ranks == 2 else f", on {case.num_ranks} ranks"
    return (
        f'<details class="proof"><summary>The program{ranks}</summary><p><small>{where}</small></p>'
        f'<div class="highlight"><pre><code>{code}\n</code></pre></div></details>'
    )
