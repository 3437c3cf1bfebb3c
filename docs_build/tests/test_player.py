"""The step player in a browser: a recorded run, its controls, and recordings that a user loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.drawing import pictures
from docs_build.recording import recordings
from docs_build.tests.browser import Tab
from minifsdp_tools import timeline

PAGE = "tools/player.html"
CLOCK = "document.querySelector('.player-clock').textContent"
STATUS = "document.querySelector('.player-status').textContent"
KEY = "fsdp2-full-pre-block-2"


def at(tab: Tab, address: str, hash_: str = "") -> None:
    """Opens the player and waits for its run."""
    tab.open(address + PAGE + hash_)
    tab.wait_for(f"{CLOCK}.includes('/')")


def moment(tab: Tab) -> tuple[int, int]:
    """The number of the shown moment, and the number of all moments."""
    shown, _, number = tab.look(CLOCK).split()[:3]
    return int(shown), int(number)


def size(num: int) -> str:
    """Formats a number of bytes as the page does."""
    if num >= 1e6:
        return f"{num / 1e6:.2f} MB"
    return f"{num / 1e3:.0f} kB" if num >= 1e4 else f"{num / 1e3:.1f} kB" if num >= 1e3 else f"{num} B"


@pytest.mark.parametrize("place", ["server", "disk"])
def test_player_moves_by_keys_mouse_and_timeline(site: Path, address: str, tab: Tab, place: str) -> None:
    at(tab, address if place == "server" else site.as_uri() + "/")
    tab.press("ArrowRight", "ArrowRight", "ArrowLeft")
    number = moment(tab)[1]
    assert moment(tab) == (2, number)
    tab.press("End")
    assert moment(tab) == (number, number)
    tab.press("Home", " ")
    tab.wait_for(f"{CLOCK}.startsWith('3 /')")
    tab.press(" ", "Home")
    tab.click(".player-button[title='Next event']")
    assert moment(tab) == (2, number)
    tab.click(".player-lanes svg")
    assert 2 < moment(tab)[0] < number
    assert tab.problems() == []


def test_every_choice_has_a_recording(address: str, tab: Tab) -> None:
    at(tab, address)
    choices = "api=fsdp1 strategy=zero2 strategy=none ranks=4 strategy=hybrid prefetch=post wrap=whole api=fsdp2"
    for choice in choices.split():
        name, _, value = choice.partition("=")
        tab.choose(f"#player-{name}", value)
        tab.wait_for(f"{STATUS}.includes('moments')")
        assert tab.look(f"document.getElementById('player-{name}').value") == value
    assert tab.problems() == []


@pytest.mark.parametrize("key", [KEY, "fsdp1-full-pre-block-2", "fsdp1-hybrid-pre-block-4"])
def test_peak_of_memory_is_that_of_the_record(address: str, tab: Tab, key: str) -> None:
    at(tab, address, "#" + key)
    run = recordings.find(key)
    shards = sum(unit["shard"] for unit in run["units"])
    for rank, of_rank in enumerate(run["ranks"]):
        # A moment has the state before it.
        states = [(held, adam) for *_, held, adam in of_rank["moments"][1:]]
        sums = []
        for held, adam in states:
            unsharded = sum(
                unit["bytes"]
                for unit, (state, *_) in zip(run["units"], held, strict=True)
                if state != "S" and unit["shard"] < unit["bytes"]
            )
            sums.append(shards + adam + unsharded + sum(one[2] + one[3] for one in held))
        assert tab.each(".track-peak")[rank] == f"peak {size(max(sums))}"


def test_the_line_that_runs_is_shown_with_its_callers(address: str, tab: Tab) -> None:
    line = "document.querySelector('.source-line[aria-current]')"
    at(tab, address)
    tab.wait_for(f"!!{line}")
    assert "self.layout.all_gather(self.root.comm_streams)" in tab.look(f"{line}.textContent")
    tab.look("document.querySelectorAll('.source-frame')[1].click()")
    assert "unit.unshard()" in tab.look(f"{line}.textContent")
    href = tab.look("document.querySelector('.source-title a').getAttribute('href')")
    assert href.startswith("../read/engine/hooks.html#IterationState.pre_forward")


def test_player_compares_torch_with_this_package_on_one_axis(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.click(".player-versus")
    tab.wait_for(f"location.hash === '#{KEY.replace('fsdp2', 'torch2')}+{KEY}/1'")
    titles = [title.split(" · ")[0] for title in tab.each(".player-title")]
    assert titles == ["torch's fully_shard", "fully_shard"]
    cursors = tab.each(".cursor", "e.getAttribute('x')")
    assert cursors[0] == cursors[1]
    tab.press("End")
    shown = tab.each(".card", "[...e.querySelectorAll('.card-bytes span')].map(e => e.textContent)")
    assert shown[:2] == shown[2:]
    assert tab.problems() == []


# --- a recording of the user ---


def drop(tab: Tab, name: str, text: str) -> None:
    """Drops a file on the player."""
    tab.look(
        f"""(() => {{ const files = new DataTransfer();
            files.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
            const facts = {{ bubbles: true, cancelable: true, dataTransfer: files }};
            document.querySelector('.player').dispatchEvent(new DragEvent('drop', facts)); }})()"""
    )
    tab.wait_for(f"{STATUS}.includes({json.dumps(name)})")


def test_dropped_trace_file_is_played(address: str, tab: Tab) -> None:
    at(tab, address)
    events = pictures.events_of("fsdp1-full-pre-block-2-wide")
    drop(tab, "steps.json", json.dumps(timeline.chrome_trace(events)))
    assert moment(tab)[1] == sum(1 + (event.end > event.start) for of_rank in events for event in of_rank)
    tab.press("1")
    said = tab.text(".player-now")
    assert re.fullmatch(r"Rank 1: all-gather of root is issued between ranks 0 and 1, [\d.]+ kB", said)
    peak = max(num for _, num in timeline.gathered_bytes(events[1]))
    assert tab.each(".track-peak")[1] == f"peak {size(peak)}"
    assert tab.problems() == []


OF_FSDP = '{"traceEvents": [{"ph": "X", "cat": "AG", "pid": 0, "ts": 1, "args": {"unit": "0", "bytes": 8}}]}'
WRONG = {
    '{"traceEvents": [{"ph"': "wrong.json is not JSON, or only the beginning of it",
    '{"loss": 3}': 'wrong.json is JSON, but no trace: it has no list "traceEvents"',
    '{"traceEvents": [null]}': "wrong.json is a trace of something else: none of its 1 events is one of FSDP's",
    OF_FSDP: 'wrong.json is damaged: event 1, AG 0, has no valid number as "dur"',
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_file_shows_error_and_changes_nothing(address: str, tab: Tab, text: str) -> None:
    at(tab, address, f"#{KEY}/5")
    drop(tab, "wrong.json", text)
    assert tab.look(STATUS).startswith(WRONG[text])
    assert moment(tab)[0] == 5
    assert tab.problems() == []
