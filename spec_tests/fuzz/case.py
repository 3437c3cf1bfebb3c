"""A program as plain data: it can be printed, sent to a rank and typed on a command line.

Worked example::

    {"api": "wrapped", "options": {"strategy": "FULL_SHARD"}, "calls": [
        {"do": "forward", "batch": 0}, {"do": "backward", "which": "all"}, {"do": "step", "on": 1}]}

``on`` names the only rank that makes the call. Without it, all ranks do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["APIS", "Call", "Case", "from_json", "to_be_loaded", "to_json"]

APIS = ("wrapped", "composed")

Call = dict[str, Any]
T = TypeVar("T")


@dataclass
class Case:
    """One program.

    Attributes:
        api: ``"wrapped"``, or ``"composed"`` for the function `fully_shard`.
        options: of the model and of the API.
        calls: in order.
    """

    api: str
    options: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_apart(self) -> bool:
        """Whether the ranks make different calls."""
        return any("on" in call or _skips_differ(call.get("skip")) for call in self.calls)


def _skips_differ(skip: Any) -> bool:
    return isinstance(skip, list) and skip[0] != skip[1]


def to_be_loaded(saved: list[T], call: Call) -> T:
    """The saved state that a call loads. The index wraps around, because shrinking can remove an earlier save."""
    return saved[call["index"] % len(saved)]


def to_json(case: Case) -> str:
    """The program as one line of JSON."""
    return json.dumps(vars(case))


def from_json(text: str) -> Case:
    """The reverse of `to_json`."""
    return Case(**json.loads(text))
