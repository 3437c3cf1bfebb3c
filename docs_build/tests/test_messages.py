"""Every message of the package ends with the address of its entry on the page "Troubleshoot".

``test_site.py`` checks on the built page that each address leads to an entry.
"""

from __future__ import annotations

import ast
import re
from string import Formatter

import pytest
from torch import nn

from docs_build.reading.messages import is_message, messages
from docs_build.reading.order import ROOT, all_modules, path_of
from minifsdp import FullyShardedDataParallel
from minifsdp.engine.messages import PAGE, texts
from spec_tests.harness import ranks


def calls_in(module: str) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Call) and node.args]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_addresses_are_unique_and_differ_from_manually_written_ones() -> None:
    written = re.findall(r"\{ #(E-[a-z0-9-]+)", (ROOT / "docs" / "troubleshoot.md").read_text())
    every = [*written, *(message.id for message in messages())]
    assert len(every) == len(set(every))


def is_complete(call: ast.Call) -> bool:
    """Whether the text of an error or warning has its rank and address, or reaches no user by itself."""
    return (
        is_message(call.args[0])
        # All warnings are issued in one place, which receives the complete text.
        or ast.unparse(call).startswith("warnings.warn(text, category")
        # The watchdog has stored a complete message.
        or ast.unparse(call.args[0]) == "log.fatal_error"
        # The grader of the exercises catches it, and prints the text of the exercise.
        or name_of(call) == "NotMetError"
    )


@pytest.mark.parametrize("module", all_modules())
def test_every_error_and_warning_gets_its_rank_and_its_address(module: str) -> None:
    speaking = [call for call in calls_in(module) if re.search(r"^warn$|(Error|Warning)$", name_of(call))]
    assert [ast.unparse(call) for call in speaking if not is_complete(call)] == []


@pytest.mark.parametrize("kind", ["message", "detail"])
def test_each_message_template_is_used_with_exactly_its_fields(kind: str) -> None:
    calls = [call for module in all_modules() for call in calls_in(module) if getattr(call.func, "id", "") == kind]
    used = {ast.literal_eval(call.args[0]): {keyword.arg for keyword in call.keywords} for call in calls}
    assert used == {
        entry: {field for _, field, _, _ in Formatter().parse(text) if field} for entry, text in texts()[kind].items()
    }


def test_each_cause_and_remedy_belongs_to_a_message() -> None:
    assert texts()["more"].keys() <= texts()["message"].keys()


@ranks(2)
def test_a_message_that_was_raised_ends_with_its_address() -> None:
    with pytest.raises(TypeError, match=r"^rank [01]: sharding_strategy must be one of") as caught:
        FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]
    last = str(caught.value).splitlines()[-1]
    assert f" {PAGE}#E-strategy-type, " in last
    assert last.endswith(" python -m minifsdp explain-error E-strategy-type")
