"""Finds figures in a text. In problems and lectures, each figure must be computed."""

import re

__all__ = ["typed"]

# Names that contain a digit.
NAMES = re.compile(
    r"\b(?:float32|float16|bfloat16|FSDP[12]|ZeRO-[123]|BSD 3-Clause|[Ll]ecture [12]|[Rr]ank 0|[Ee]xercise \d+)\b"
)
WORDS = re.compile(
    r"\b(?:three|four|five|six|seven|eight|nine|ten|twelve|twice|half|doubled?|thirds?|quarters?|dozens?|hundreds?"
    r"|thousands?|millions?|billions?)\b",
    re.IGNORECASE,
)


def typed(prose: str) -> list[str]:
    """The figures in a text, as digits and as words."""
    rest = NAMES.sub("", prose)
    return re.findall(r"\S*\d\S*", rest) + WORDS.findall(rest)
