"""The box "Paste your traceback", for every message of minifsdp and for pasted output of torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from docs_build.pages import paste
from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.pasted import OF_TORCH, share, spoken, traceback
from minifsdp.engine.messages import PAGE, texts

PAGES_OWN = paste.of_the_page()


def test_page_has_errors_of_torch_with_cause_remedy_and_an_example_each() -> None:
    assert len(PAGES_OWN) >= 25
    assert {one.id for one in PAGES_OWN} == OF_TORCH.keys()
    bodies = {entry["id"]: entry["body"] for entry in paste.ENTRY.finditer(paste.PAGE.read_text(encoding="utf-8"))}
    for one in PAGES_OWN:
        assert "**Cause.**" in bodies[one.id]
        assert "**Remedy.**" in bodies[one.id]


def test_every_line_of_a_long_message_finds_its_entry() -> None:
    lines = {"".join(line) for one in paste.known() for line in [*one.lines, *one.wholes]}
    details = {name: paste._pieces(text) for name, text in texts()["detail"].items() if not name.startswith("explain-")}
    assert [name for name, pieces in details.items() if "".join(pieces) not in lines] == []


# ---- in a browser


def behind_a_prefix(text: str) -> str:
    """As torchrun prints two ranks: interleaved line by line."""
    ours, theirs = traceback(text, "[rank1]: ").splitlines(), traceback("SystemExit: 1", "[rank0]: ").splitlines()
    mixed = [line for both in zip(ours, theirs, strict=False) for line in both]
    return "\n".join(mixed + ours[len(theirs) :])


def wrapped(text: str) -> str:
    """As a narrow terminal breaks lines: inside words."""
    return "\n".join(line[i : i + 47] for line in traceback(text).splitlines() for i in range(0, len(line), 47))


def with_dates(text: str) -> str:
    return traceback(text, "2026-11-24T01:47:38.123Z ")


def from_pytest(text: str) -> str:
    return "\n".join(f"E       {line}" for line in text.splitlines())


WAYS = [str, behind_a_prefix, wrapped, with_dates, from_pytest]


@pytest.fixture(scope="module")
def page(address: str, tab: Tab) -> Tab:
    tab.open(address + PAGE)
    tab.wait_for("!!window.findTroubles")
    return tab


def found_in(tab: Tab, pasted: dict[str, str]) -> dict[str, list[str]]:
    """The entries found for each text, the best first."""
    ask = "([id, text]) => [id, findTroubles(text).found.map((one) => one.entry.id)]"
    return dict(tab.look(f"Object.entries({json.dumps(pasted)}).map({ask})"))


@pytest.mark.parametrize("way", WAYS)
def test_each_message_finds_its_entry_first(page: Tab, way: Callable[[str], str]) -> None:
    for has_address in (False, True):
        ours = {message.id: way(spoken(message, has_address)) for message in messages()}
        assert share(found_in(page, ours)) == 1
    assert share(found_in(page, {id: way(text) for id, text in OF_TORCH.items()})) == 1


def test_address_alone_or_half_a_message_finds_its_entry(page: Tab) -> None:
    assert share(found_in(page, {message.id: f"see {message.id} please" for message in messages()})) == 1
    long = {message.id: spoken(message, False) for message in messages() if len(message.text) > 150}
    assert share(found_in(page, {id: text[: len(text) // 2] for id, text in long.items()})) > 0.85


def test_cause_is_listed_before_consequences_and_the_report_of_the_launcher_last(page: Tab) -> None:
    follows = [traceback(OF_TORCH[id], f"[rank{rank}]: ") for rank, id in enumerate(["E-watchdog", "E-child-failed"])]
    (warning,) = [message for message in messages() if message.id == "E-old-spelling"]
    cause = traceback(OF_TORCH["E-out-of-memory"], "[rank2]: ")
    found = found_in(page, {"all": "\n".join([spoken(warning, True), *follows, cause])})["all"]
    assert found == ["E-out-of-memory", "E-old-spelling", "E-watchdog", "E-child-failed"]
    report = OF_TORCH["E-child-failed"] + "\n" + "Sending process 4711 closing signal SIGTERM\n" * 3
    assert found_in(page, {"hang": report + follows[0]})["hang"] == ["E-watchdog", "E-child-failed"]


UNKNOWN = [
    "ModuleNotFoundError: No module named 'flash_attn'",
    traceback("KeyError: 'input_ids'", "[rank0]: "),
    "Epoch 3: 41%|████      | 120/290 [00:51<01:12, 2.36it/s, loss=2.31]",
    "The parameters of the model are sharded between all of the ranks, and that is fine.",
    "RuntimeError: CUDA error: the launch timed out and was terminated",
]


def test_unknown_text_matches_no_entry(page: Tab) -> None:
    assert found_in(page, {text: text for text in UNKNOWN}) == {text: [] for text in UNKNOWN}


def test_search_in_a_large_log_is_fast(page: Tab) -> None:
    log = "\n".join(traceback("KeyError: 'input_ids'", f"[rank{rank % 8}]: ") for rank in range(6000))
    text = log + "\n" + traceback(OF_TORCH["E-freed-storage"], "[rank3]: ")
    assert len(text) > 10**6
    ask = f"(() => {{ const t = performance.now(); const f = findTroubles({json.dumps(text)}).found;"
    first, milliseconds = page.look(ask + " return [f[0].entry.id, performance.now() - t]; })()")
    assert first == "E-freed-storage"
    assert milliseconds < 5000


def test_error_search_works_by_keyboard_from_a_local_file(site: Path, tab: Tab) -> None:
    tab.open((site / PAGE).as_uri())
    tab.wait_for("!!window.findTroubles")
    tab.focus("#paste-text")
    tab.type(traceback(OF_TORCH["E-writeback"], "[rank1]: "))
    status = "document.getElementById('paste-status').textContent"
    assert tab.wait_for(status) == "1 entry found: Cannot writeback when the parameter shape changes"
    assert "On rank 1." in tab.text(".paste-why")
    assert "Cause." in tab.text(".paste-body")
    # Skip two buttons; then comes the heading of the entry.
    tab.press("Tab", "Tab", "Tab")
    assert tab.look("document.activeElement.getAttribute('href')") == "#E-writeback"
    tab.click("#paste button[type=reset]")
    assert tab.text("#paste-found") == ""
    tab.type("KeyError: 'input_ids'")
    tab.wait_for(f"{status}.startsWith('No entry matches this text')")
    # Nothing is stored.
    assert "paste" not in tab.look("Object.keys(localStorage).concat(Object.keys(sessionStorage)).join()")
    assert tab.problems() == []
