"""The step player in a browser: a recorded run, its controls, and recordings that a user loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from docs_build.drawing import pictures
from docs_build.recording import recordings
from docs_build.tests.browser import Tab
from minifsdp import fully_shard
from minifsdp_tools import timeline
from spec_tests.harness import ranks

PAGE = "tools/player.html"
CLOCK = "document.querySelector('.player-clock').textContent"
STATUS = "document.querySelector('.player-status').textContent"
LINE = "document.querySelector('.source-line[aria-current]')"
KEY = "fsdp2-full-pre-block-2"


def at(tab: Tab, address: str, hash_: str = "") -> None:
    """Opens the player and waits for its run."""
    tab.open(address + PAGE + hash_)
    tab.wait_for(f"{CLOCK}.includes('/')")


def moment(tab: Tab) -> int:
    return int(tab.look(CLOCK).split()[0])


def number(tab: Tab) -> int:
    return int(tab.look(CLOCK).split()[2])


def card(tab: Tab, rank: int) -> dict[str, str]:
    """The sizes in a rank's card, by name."""
    texts = tab.each(".card", "[...e.querySelectorAll('.card-bytes span')].map(e => e.textContent)")[rank]
    return {text.rsplit(" ", 2)[0]: " ".join(text.rsplit(" ", 2)[1:]) for text in texts}


def size(num: int) -> str:
    """Formats a number of bytes as the page does."""
    if num >= 1e6:
        return f"{num / 1e6:.2f} MB"
    return f"{num / 1e3:.0f} kB" if num >= 1e4 else f"{num / 1e3:.1f} kB" if num >= 1e3 else f"{num} B"


def after(run: dict[str, Any], rank: int, n: int) -> dict[str, int]:
    """The memory of a rank after a moment: the values recorded just before the next one."""
    moments = run["ranks"][rank]["moments"]
    *_, held, adam = moments[min(n + 1, len(moments) - 1)]
    pairs = zip(run["units"], held, strict=True)
    parts = {
        "shards": sum(unit["shard"] for unit in run["units"]),
        "Adam": adam,
        "gathered": sum(u["bytes"] for u, h in pairs if h[0] != "S" and u["shard"] < u["bytes"]),
        "whole gradients": sum(h[3] for h in held),
        "reduced gradients": sum(h[2] for h in held),
    }
    return {**parts, "together": sum(parts.values())}


@pytest.mark.parametrize("place", ["server", "disk"])
def test_player_moves_by_keys_mouse_and_timeline(site: Path, address: str, tab: Tab, place: str) -> None:
    at(tab, address if place == "server" else site.as_uri() + "/")
    tab.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert moment(tab) == 2
    tab.press("End")
    assert moment(tab) == number(tab)
    tab.press("Home", " ")
    tab.wait_for(f"{CLOCK}.startsWith('3 /')")
    tab.press(" ", "Home")
    tab.click(".player-button[title='Next event']")
    assert moment(tab) == 2
    tab.click(".player-lanes svg")
    assert 2 < moment(tab) < number(tab)
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


def test_the_address_keeps_run_and_moment(address: str, tab: Tab) -> None:
    at(tab, address, "#fsdp1-full-pre-block-2/30")
    assert tab.look("document.getElementById('player-api').value") == "fsdp1"
    tab.press("ArrowRight")
    tab.wait_for("location.hash.endsWith('-2/31')")
    tab.look(f"location.hash = '#{KEY}/7'")
    tab.wait_for(f"{CLOCK}.startsWith('7 /')")
    for unknown in ("#nonsense/3", f"#{KEY}/999999", f"#{KEY}+nonsense", "#how-to-read-it"):
        at(tab, address, unknown)
        assert 1 <= moment(tab) <= number(tab)
        assert tab.problems() == []


@pytest.mark.parametrize("key", [KEY, "fsdp1-full-pre-block-2", "fsdp1-hybrid-pre-block-4"])
def test_memory_is_that_of_the_record(address: str, tab: Tab, key: str) -> None:
    at(tab, address, "#" + key)
    run = recordings.find(key)
    for rank, of_rank in enumerate(run["ranks"]):
        every = [after(run, rank, n) for n in range(len(of_rank["moments"]))]
        peak = max(every, key=lambda one: one["together"])
        assert tab.each(".track-peak")[rank] == f"peak {size(peak['together'])}"
        tab.look(f"document.querySelectorAll('.card')[{rank}].querySelector('.card-button:last-child').click()")
        assert card(tab, rank) == {name: size(num) for name, num in peak.items()}


def test_the_line_that_runs_is_shown_with_its_callers(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.wait_for(f"!!{LINE}")
    assert "self.layout.all_gather(self.root.comm_streams)" in tab.look(f"{LINE}.textContent")
    tab.look("document.querySelectorAll('.source-frame')[1].click()")
    assert "unit.unshard()" in tab.look(f"{LINE}.textContent")
    href = tab.look("document.querySelector('.source-title a').getAttribute('href')")
    assert href.startswith("../read/engine/hooks.html#IterationState.pre_forward")


def test_two_runs_share_one_axis_and_one_address(address: str, tab: Tab) -> None:
    at(tab, address)
    alone = number(tab)
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.player-run').length === 2")
    # The second run has another strategy, and fewer all-gathers.
    assert alone < number(tab) < 2 * alone
    tab.choose(".player-slider", str(number(tab) // 2))
    cursors = tab.each(".cursor", "e.getAttribute('x')")
    assert cursors[0] == cursors[1]
    tab.wait_for(f"location.hash === '#{KEY}+{KEY.replace('full', 'zero2')}/{moment(tab)}'")
    tab.click(".player-beside")
    assert number(tab) == alone
    assert tab.problems() == []


def test_player_compares_torch_with_this_package(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.click(".player-versus")
    tab.wait_for(f"location.hash === '#{KEY.replace('fsdp2', 'torch2')}+{KEY}/1'")
    titles = [title.split(" · ")[0] for title in tab.each(".player-title")]
    assert titles == ["torch's fully_shard", "fully_shard"]
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


def test_dropped_trace_file_is_played(address: str, tab: Tab) -> None:
    at(tab, address)
    events = pictures.events_of("fsdp1-full-pre-block-2-wide")
    drop(tab, "steps.json", json.dumps(timeline.chrome_trace(events)))
    tab.wait_for(f"{STATUS}.includes('steps.json')")
    assert number(tab) == sum(1 + (event.end > event.start) for of_rank in events for event in of_rank)
    tab.press("1")
    said = tab.text(".player-now")
    assert re.fullmatch(r"Rank 1: all-gather of root is issued between ranks 0 and 1, [\d.]+ kB", said)
    peak = max(num for _, num in timeline.gathered_bytes(events[1]))
    assert tab.each(".track-peak")[1] == f"peak {size(peak)}"
    # Return to the recorded run.
    tab.click(".player-back")
    tab.wait_for(f"{STATUS} === '118 moments on 2 ranks, 5 units.'")
    assert tab.problems() == []


OF_FSDP = '{"traceEvents": [{"ph": "X", "cat": "AG", "pid": 0, "ts": 1, "args": {"unit": "0", "bytes": 8}}]}'
WRONG = {
    '{"traceEvents": [{"ph"': "wrong.json is not JSON, or only the beginning of it",
    '{"loss": 3}': 'wrong.json is JSON, but no trace: it has no list "traceEvents"',
    '{"traceEvents": []}': "wrong.json is a trace without a single event: was the recorder around a step?",
    '{"traceEvents": [null]}': "wrong.json is a trace of something else: none of its 1 events is one of FSDP's",
    OF_FSDP: 'wrong.json is damaged: event 1, AG 0, has no valid number as "dur"',
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_file_shows_error_and_changes_nothing(address: str, tab: Tab, text: str) -> None:
    at(tab, address, f"#{KEY}/5")
    drop(tab, "wrong.json", text)
    tab.wait_for(f"{STATUS}.includes('wrong.json')")
    assert tab.look(STATUS).startswith(WRONG[text])
    assert moment(tab) == 5
    assert tab.problems() == []


@ranks(2)
def test_example_code_on_the_page_writes_a_trace_file(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / PAGE.replace("html", "md")).read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0].replace('"steps.json"', repr(str(tmp_path / "s.json")))
    model = fully_shard(nn.Linear(4, 4))
    exec(code, {"train_step": lambda: model(torch.ones(2, 4)).sum().backward()})
    if dist.get_rank() == 0:
        events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
        assert {(e["cat"], e["pid"]) for e in events if "cat" in e} >= {("AG", 0), ("AG", 1), ("RS", 0), ("RS", 1)}
