"""The box "Paste your traceback" and the search, for every message of minifsdp and for pasted output of torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docs_build.pages import paste
from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts
from docs_build.tests.pasted import OF_TORCH, spoken, traceback
from minifsdp.engine.messages import PAGE, texts

PAGES_OWN = paste.of_the_page()


def test_every_message_has_searchable_text() -> None:
    words = {one.id: sum(len(piece) for whole in one.wholes for piece in whole) for one in paste.known()}
    assert {message.id for message in messages()} <= words.keys()
    assert min(words.values()) > 10


def test_page_has_at_least_25_errors_of_torch_with_an_example_each() -> None:
    assert len(PAGES_OWN) >= 25
    assert {one.id for one in PAGES_OWN} == OF_TORCH.keys()


def test_entries_have_different_quotes() -> None:
    quotes = Counter("…".join(whole).lower() for one in PAGES_OWN for whole in one.wholes)
    assert [quote for quote, number in quotes.items() if number > 1] == []


def test_every_line_of_a_long_message_finds_its_entry() -> None:
    lines = {"".join(line) for one in paste.known() for line in [*one.lines, *one.wholes]}
    details = {name: paste._pieces(text) for name, text in texts()["detail"].items() if not name.startswith("explain-")}
    assert [name for name, pieces in details.items() if "".join(pieces) not in lines] == []


def test_every_torch_entry_has_cause_and_remedy() -> None:
    parts = {entry["id"]: entry["body"] for entry in paste.ENTRY.finditer(paste.PAGE.read_text(encoding="utf-8"))}
    bodies = {one.id: parts[one.id] for one in PAGES_OWN}
    assert [id for id, body in bodies.items() if "**Cause.**" not in body or "**Remedy.**" not in body] == []


# ---- in a browser


def as_a_whole(text: str) -> str:
    return text


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


WAYS = [as_a_whole, behind_a_prefix, wrapped, with_dates, from_pytest]


@pytest.fixture(scope="module")
def page(address: str, tab: Tab) -> Tab:
    tab.open(address + PAGE)
    tab.wait_for("!!window.findTroubles")
    return tab


def found_in(tab: Tab, pasted: dict[str, str]) -> dict[str, list[str]]:
    """The entries found for each text, the best first."""
    ask = "([id, text]) => [id, findTroubles(text).found.map((one) => one.entry.id)]"
    return dict(tab.look(f"Object.entries({json.dumps(pasted)}).map({ask})"))


def share(what: str, found: dict[str, list[str]]) -> float:
    """Share of texts whose entry is found first. Prints it with the texts for which it is not."""
    first = [id for id, ids in found.items() if ids[:1] == [id]]
    print(f"{what}: {len(first)} of {len(found)} first", {id: ids[:3] for id, ids in found.items() if id not in first})
    return len(first) / len(found)


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_address", [False, True], ids=["words", "address"])
def test_each_message_of_this_package_finds_its_entry_first(page: Tab, way: Any, has_address: bool) -> None:
    pasted = {message.id: way(spoken(message, has_address)) for message in messages()}
    assert share(f"box, ours, {way.__name__}", found_in(page, pasted)) == 1


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("way", WAYS)
def test_each_error_of_torch_finds_its_entry_first(page: Tab, way: Any) -> None:
    assert share(f"box, torch's, {way.__name__}", found_in(page, {id: way(text) for id, text in OF_TORCH.items()})) == 1


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_address_alone_or_half_a_message_finds_its_entry(page: Tab) -> None:
    addresses = {message.id: f"see {message.id} please" for message in messages()}
    assert share("box, address alone", found_in(page, addresses)) == 1
    long = [message for message in messages() if len(message.text) > 150]
    halves = {message.id: (text := spoken(message, False))[: len(text) // 2] for message in long}
    assert share("box, first half", found_in(page, halves)) > 0.85


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_cause_is_listed_before_consequences(page: Tab) -> None:
    follows = [traceback(OF_TORCH[id], f"[rank{rank}]: ") for rank, id in enumerate(["E-watchdog", "E-child-failed"])]
    (warning,) = [message for message in messages() if message.id == "E-old-spelling"]
    cause = traceback(OF_TORCH["E-out-of-memory"], "[rank2]: ")
    found = found_in(page, {"all": "\n".join([spoken(warning, True), *follows, cause])})["all"]
    assert found[:2] == ["E-out-of-memory", "E-old-spelling"]
    assert found[2:] == ["E-watchdog", "E-child-failed"]


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_report_of_the_launcher_is_the_last(page: Tab) -> None:
    watchdog = traceback(OF_TORCH["E-watchdog"], "[rank1]: ")
    report = OF_TORCH["E-child-failed"] + "\n" + "Sending process 4711 closing signal SIGTERM\n" * 3
    assert found_in(page, {"hang": report + watchdog})["hang"] == ["E-watchdog", "E-child-failed"]
    killed = report + OF_TORCH["E-killed"]
    assert found_in(page, {"killed": killed})["killed"] == ["E-killed", "E-child-failed"]


UNKNOWN = [
    "ModuleNotFoundError: No module named 'flash_attn'",
    traceback("KeyError: 'input_ids'", "[rank0]: "),
    "Epoch 3: 41%|████      | 120/290 [00:51<01:12, 2.36it/s, loss=2.31]",
    "The parameters of the model are sharded between all of the ranks, and that is fine.",
    "RuntimeError: CUDA error: the launch timed out and was terminated",
]


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_text_matches_no_entry(page: Tab, text: str) -> None:
    assert found_in(page, {"it": text}) == {"it": []}


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_search_in_a_large_log_is_fast(page: Tab) -> None:
    log = "\n".join(traceback("KeyError: 'input_ids'", f"[rank{rank % 8}]: ") for rank in range(4000))
    text = log + "\n" + traceback(OF_TORCH["E-freed-storage"], "[rank3]: ")
    assert len(text) > 10**6
    ask = f"(() => {{ const t = performance.now(); const f = findTroubles({json.dumps(text)}).found;"
    first, milliseconds = page.look(ask + " return [f[0].entry.id, performance.now() - t]; })()")
    print(f"box, {len(text) / 1e6:.1f} million characters: {milliseconds:.0f} ms")
    assert first == "E-freed-storage"
    assert milliseconds < 5000


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_error_search_works_by_keyboard_from_a_local_file(site: Path, tab: Tab) -> None:
    tab.open((site / PAGE).as_uri())
    tab.wait_for("!!window.findTroubles")
    tab.look("document.getElementById('paste-text').focus()")
    tab.type(traceback(OF_TORCH["E-writeback"], "[rank1]: "))
    status = "document.getElementById('paste-status').textContent"
    assert tab.wait_for(status) == "1 entry found: Cannot writeback when the parameter shape changes"
    assert "On rank 1." in tab.look("document.querySelector('.paste-why').textContent")
    assert "Cause." in tab.look("document.querySelector('.paste-body').textContent")
    # Skip two buttons; then comes the heading of the entry.
    for _ in range(3):
        tab.press("Tab")
    assert tab.look("document.activeElement.getAttribute('href')") == "#E-writeback"
    ids = tab.look("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert [id for id, number in Counter(ids).items() if number > 1 and id.startswith(("E-", "paste"))] == []
    assert tab.look("document.getElementById('paste-status').getAttribute('aria-live')") == "polite"
    assert tab.look("document.querySelector('label[for=paste-text]').textContent") == "Paste your traceback"
    assert tab.problems() == []


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_error_search_shows_the_example_resets_and_reports_no_match(page: Tab) -> None:
    page.click("#paste-example")
    ids = page.look("[...document.querySelectorAll('.paste-title')].map(e => e.getAttribute('href'))")
    assert ids[0] == "#E-not-allocated"
    assert {*ids[1:]} == {"#E-watchdog", "#E-child-failed"}
    page.click("#paste button[type=reset]")
    assert page.look("document.getElementById('paste-found').children.length") == 0
    assert page.look("document.activeElement.id") == "paste-text"
    page.type("KeyError: 'input_ids'")
    page.wait_for("document.getElementById('paste-status').textContent.startsWith('No entry matches this text')")
    assert page.look("Object.keys(localStorage).concat(Object.keys(sessionStorage)).join().includes('paste')") is False
    assert not re.search("KeyError", page.look("location.href"))
    page.click("#paste button[type=reset]")


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_the_box_is_easy_to_read_and_fits_a_phone(page: Tab, scheme: str) -> None:
    page.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    page.click("#paste-example")
    worst = contrasts(page, ".paste *")[0]
    page.resize(390, 844)
    width = page.look("document.documentElement.scrollWidth")
    page.resize(1280, 900)
    page.click("#paste button[type=reset]")
    assert worst[0] >= 4.5, worst
    assert width <= 390
