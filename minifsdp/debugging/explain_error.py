"""``python -m minifsdp``: lists the tools, and explains an error message.

Every error and warning ends with the command that explains it::

    python -m minifsdp explain-error E-tied-across-units

The command prints the text of the message, with ``…`` in place of its values, and more about the cause and the fix.
Without an argument, it lists all entries. The page "Troubleshoot" of the documentation is generated from the same
texts.

*In torch:* no such command.

Spec: START-05, START-06.
"""

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from string import Formatter

from minifsdp.engine.messages import MORE, PAGE, texts

WRAPPER = textwrap.TextWrapper(100, break_on_hyphens=False, break_long_words=False)
TOOLS = texts()["help"]["tools"]


def explanation(entry: str) -> str:
    """Returns the text of a message and the fix.

    Args:
        entry: the entry at the end of a message, with or without ``E-`` and ``#``.

    Raises:
        KeyError: if there is no such message.
    """
    name = entry.rpartition("#")[2].removeprefix("E-")
    parts = Formatter().parse(texts()["message"][name])
    text = "".join(
        words + ("" if field is None else "…") for words, field, _, _ in parts
    )
    paragraphs = [
        line
        for line in [*text.strip().splitlines(), texts()["more"].get(name, "")]
        if line
    ]
    return "\n\n".join(
        [f"E-{name}", *map(WRAPPER.fill, paragraphs), f"{MORE}: {PAGE}#E-{name}"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for an unknown entry, otherwise 0."""
    parser = argparse.ArgumentParser(
        "python -m minifsdp", description="The tools of minifsdp."
    )
    command = parser.add_subparsers(dest="command").add_parser(
        "explain-error", help="explain an error message"
    )
    command.add_argument(
        "entry",
        nargs="?",
        help="the entry that the message names, E-...; default: list all entries",
    )
    options = parser.parse_args(arguments)
    entries = [f"E-{name}" for name in sorted(texts()["message"])]
    if options.command is None or options.entry is None:
        print(TOOLS.strip() if options.command is None else "\n".join(entries))
        return 0
    try:
        print(explanation(options.entry))
    except KeyError:
        close = (
            ", ".join(difflib.get_close_matches(options.entry, entries))
            or "none is similar"
        )
        print(f"minifsdp has no message {options.entry}. Similar entries: {close}")
        return 2
    return 0
