"""Every message of the package ends with the address of its entry on the page "Troubleshoot".

``test_site.py`` checks on the built page that each address leads to an entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest
from torch import nn

from docs_build.reading.messages import is_message, messages
from docs_build.reading.order import ROOT, all_modules, path_of
from minifsdp import FullyShardedDataParallel
from minifsdp.engine.messages import PAGE, texts
from spec_tests.harness import ranks

WRITTEN = ROOT / "docs" / "troubleshoot.md"


def test_addresses_are_unique_and_differ_from_manually_written_ones() -> None:
    ids = [message.id for message in messages()]
    written = re.findall(r"\{ #(E-[a-z0-9-]+)", WRITTEN.read_text())
    assert len(ids + written) == len({*ids, *written})


KINDS = {
    "E-never-gathered": ("RuntimeError", "waits for an all-gather that was never issued"),
    "E-strategy-type": ("TypeError", "sharding_strategy must be one of"),
    "E-stale-optimizer": ("UserWarning", "were replaced when the model was sharded"),
    "E-old-spelling": ("FutureWarning", "is an old spelling"),
}


@pytest.mark.parametrize("id", KINDS)
def test_messages_are_read_from_the_source(id: str) -> None:
    (message,) = [one for one in messages() if one.id == id]
    kind, words = KINDS[id]
    assert message.kind == kind
    assert words in message.text


@pytest.mark.parametrize("name", all_modules())
def test_every_error_and_warning_gets_its_rank_and_its_address(name: str) -> None:
    assert [ast.unparse(call) for call in _speaking(path_of(name)) if not is_message(call.args[0])] == []


def _speaking(path: Path) -> Iterator[ast.Call]:
    """The calls that create an error or a warning with a text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # All warnings are issued in one place, which receives the complete text.
            is_the_place = ast.unparse(node).startswith("warnings.warn(text, category")
            # The watchdog has stored a complete message.
            is_the_place |= ast.unparse(node.args[0]) == "log.fatal_error"
            # The grader of the exercises catches it, and prints the text of the exercise.
            is_the_place |= name == "NotMetError"
            if (name == "warn" or name.endswith(("Error", "Warning"))) and not is_the_place:
                yield node


@pytest.mark.parametrize("kind", ["message", "detail"])
def test_each_message_template_is_used_with_exactly_its_fields(kind: str) -> None:
    nodes = [node for name in all_modules() for node in ast.walk(ast.parse(path_of(name).read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == kind]
    used = {ast.literal_eval(call.args[0]): {keyword.arg for keyword in call.keywords} for call in calls}
    assert used == {
        entry: {field for _, field, _, _ in Formatter().parse(text) if field} for entry, text in texts()[kind].items()
    }


@ranks(2)
def test_a_message_that_was_raised_ends_with_its_address() -> None:
    with pytest.raises(TypeError) as caught:
        FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]
    first, last = str(caught.value).split("\n")
    assert re.match(r"rank [01]: sharding_strategy must be one of", first)
    assert f" {PAGE}#E-strategy-type, " in last
    assert last.endswith(" python -m minifsdp explain-error E-strategy-type")
