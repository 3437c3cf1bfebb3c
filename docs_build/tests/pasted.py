"""Texts that users paste: messages of minifsdp as a program prints them, and output of torch and its launchers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from string import Formatter

from docs_build.reading.messages import Message
from minifsdp.engine.messages import COMMAND, MORE, PAGE, texts

__all__ = ["ASKED", "OF_TORCH", "not_first", "spoken", "traceback"]

# By the ID of the entry that must be found first.
OF_TORCH = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Problems in the words of users, with the ID of their entry.
ASKED = tomllib.loads(Path(__file__).with_name("asked.toml").read_text(encoding="utf-8"))
# Plausible values for the placeholders, by their names. All others get the default in `spoken`.
VALUES = {
    "path": "layers.3.attention.query.weight",
    "unit": "layers.3",
    "shape": (1024, 256),
    "ranks": "0, 2 and 3",
    "lines": "parameter 'head.weight' on rank(s) 1, 3 differs from that on rank 0",
    "report": "\n  rank 0 waits in the all-gather of layers.1 since 12.0 s (train.py:61)\n  rank 1 has ended",
    "places": "  rank 1: 3 of 64 are nan",
    "problem": "the optimizer: expected parameters of the model, found 3, of shapes [(4, 4)], that are not parameters "
    "of the model; build it from model.parameters() after wrapping, and pass the model that it was built from",
}


def spoken(message: Message, has_address: bool) -> str:
    """Formats a message with values for its placeholders, as the program prints it."""
    name = message.id.removeprefix("E-")
    template = texts()["message"][name]
    numbers = {field: 3 for _, field, spec, _ in Formatter().parse(template) if field and spec}
    others = {field: "something of yours" for _, field, _, _ in Formatter().parse(template) if field}
    text = template.format_map(others | numbers | VALUES)
    end = f"\n{MORE}: {PAGE}#{message.id}, {COMMAND}{name}" if has_address else ""
    return f"{message.kind}: rank 1: {text}{end}"


def traceback(last: str, prefix: str = "") -> str:
    """A traceback that ends with a message."""
    module = "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py"
    lines = ["Traceback (most recent call last):", f'  File "{module}", line 1779, in _wrapped_call_impl']
    lines += ["    return self._call_impl(*args, **kwargs)", *last.splitlines()]
    return "\n".join(prefix + line for line in lines)


def not_first(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The texts whose entry is not found first, by the ID of this entry, with the entries that are found instead."""
    return {id: ids[:3] for id, ids in found.items() if ids[:1] != [id]}
