"""Parts of messages: one line about one value among several, and a list of names that is cut off.

Worked example::

    some(["a", "b", "c"], most=2)      "a, b and 1 more"

*In torch:* each message builds its own list.

Spec: START-05, and every requirement of a clear error.
"""

from minifsdp.engine.messages import texts


def detail(entry: str, /, **values: object) -> str:
    """A line about one value inside a message about several values. It contains neither the rank nor an address."""
    return texts()["detail"][entry].format(**values)


def some(words: list[str] | tuple[str, ...], most: int = 10) -> str:
    """The first words of a list for a message, and the number of words that are left out."""
    return ", ".join(words[:most]) + (
        f" and {len(words) - most} more" if len(words) > most else ""
    )
