"""The box "Paste your traceback", for every message of minifsdp and for pasted output of torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from docs_build.pages import paste
from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.pasted import ASKED, OF_TORCH, not_first, spoken, traceback
from minifsdp.engine.messages import PAGE


def test_page_has_errors_of_torch_with_cause_remedy_and_an_example_each() -> None:
    assert {one.id for one in paste.of_the_page() if one.wholes} == OF_TORCH.keys()
    bodies = {entry["id"]: entry["body"] for entry in paste.ENTRY.finditer(paste.PAGE.read_text(encoding="utf-8"))}
    for id in OF_TORCH:
        assert "**Cause.**" in bodies[id]
        assert "**Remedy.**" in bodies[id]


def behind_a_prefix(text: str) -> str:
    """As torchrun prints two ranks: interleaved line by line."""
    ours, theirs = traceback(text, "[rank1]: ").splitlines(), traceback("SystemExit: 1", "[rank0]: ").splitlines()
    mixed = [line for both in zip(ours, theirs, strict=False) for line in both]
    return "\n".join(mixed + ours[len(theirs) :])


def wrapped(text: str) -> str:
    """As a narrow terminal breaks lines: inside words."""
    return "\n".join(line[i : i + 47] for line in traceback(text).splitlines() for i in range(0, len(line), 47))


def from_pytest(text: str) -> str:
    return "\n".join(f"E       {line}" for line in text.splitlines())


@pytest.fixture
def page(site: Path, tab: Tab) -> Tab:
    tab.open((site / PAGE).as_uri())
    tab.wait_for("!!window.findTroubles")
    return tab


def found_in(tab: Tab, pasted: dict[str, str]) -> dict[str, list[str]]:
    """The entries found for each text, the best first."""
    ask = "([id, text]) => [id, findTroubles(text).found.map((one) => one.entry.id)]"
    return dict(tab.look(f"Object.entries({json.dumps(pasted)}).map({ask})"))


@pytest.mark.parametrize("way", [str, behind_a_prefix, wrapped, from_pytest])
@pytest.mark.parametrize("has_address", [False, True])
def test_each_message_finds_its_entry_first(page: Tab, way: Callable[[str], str], *, has_address: bool) -> None:
    ours = {message.id: way(spoken(message, has_address)) for message in messages()}
    torchs = {id: way(text) for id, text in OF_TORCH.items()}
    assert not_first(found_in(page, ours | torchs)) == {}


def test_cause_is_listed_before_consequences_and_the_report_of_the_launcher_last(page: Tab) -> None:
    follows = [traceback(OF_TORCH[id], f"[rank{rank}]: ") for rank, id in enumerate(["E-watchdog", "E-child-failed"])]
    (warning,) = [message for message in messages() if message.id == "E-old-spelling"]
    cause = traceback(OF_TORCH["E-out-of-memory"], "[rank2]: ")
    found = found_in(page, {"all": "\n".join([spoken(warning, True), *follows, cause])})["all"]
    assert found == ["E-out-of-memory", "E-old-spelling", "E-watchdog", "E-child-failed"]


def test_problem_in_the_words_of_a_user_is_among_the_first_three(page: Tab) -> None:
    found = found_in(page, {words: words for words in ASKED})
    assert len(ASKED) == 40
    assert {words: found[words][:3] for words, id in ASKED.items() if id not in found[words][:3]} == {}


UNKNOWN = [
    "ModuleNotFoundError: No module named 'flash_attn'",
    traceback("KeyError: 'input_ids'", "[rank0]: "),
    "The parameters of the model are sharded between all of the ranks, and that is fine.",
    "RuntimeError: CUDA error: the launch timed out and was terminated",
]


def test_unknown_text_matches_no_entry(page: Tab) -> None:
    assert found_in(page, {text: text for text in UNKNOWN}) == {text: [] for text in UNKNOWN}


def test_error_search_works_by_keyboard_and_stores_nothing(page: Tab) -> None:
    page.focus("#paste-text")
    page.type(traceback(OF_TORCH["E-writeback"], "[rank1]: "))
    page.wait_for("document.getElementById('paste-status').textContent")
    assert page.text("#paste-status") == "1 entry found: Cannot writeback when the parameter shape changes"
    assert "On rank 1." in page.text(".paste-why")
    assert "Cause." in page.text(".paste-body")
    # Skip two buttons; then comes the heading of the entry.
    page.press("Tab", "Tab", "Tab")
    assert page.look("document.activeElement.getAttribute('href')") == "#E-writeback"
    page.click("#paste button[type=reset]")
    assert page.text("#paste-found") == ""
    assert "paste" not in page.look("Object.keys(localStorage).concat(Object.keys(sessionStorage)).join()")
    assert page.problems() == []
