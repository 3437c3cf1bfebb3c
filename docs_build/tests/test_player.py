"""The step player in a browser: its view of a recorded run, its controls, and recordings that a user loads."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from docs_build.drawing import pictures
from docs_build.recording import recordings
from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts
from minifsdp import fully_shard
from minifsdp_tools import timeline
from spec_tests.harness import ranks

browser = [pytest.mark.docs, pytest.mark.needs("mkdocs")]
in_browser: Callable[..., Any] = lambda test: browser[0](browser[1](test))  # noqa: E731

PAGE = "tools/player.html"
CLOCK = "document.querySelector('.player-clock').textContent"
NOW = "document.querySelector('.player-now').textContent"
STATUS = "document.querySelector('.player-status').textContent"
KEY = "fsdp2-full-pre-block-2"
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desk": (1440, 900)}


def at(tab: Tab, address: str, hash_: str = "", size: str = "desk") -> Tab:
    """Opens the player and waits for its run. Opens another page first, because an anchor alone reloads nothing."""
    tab.resize(*SIZES[size])
    tab.open("about:blank")
    tab.open(address + PAGE + hash_)
    tab.wait_for(f"{CLOCK}.includes('/')")
    return tab


def moment(tab: Tab) -> int:
    return int(tab.look(CLOCK).split()[0])


def number(tab: Tab) -> int:
    return int(tab.look(CLOCK).split()[2])


def card(tab: Tab, rank: int) -> dict[str, str]:
    """The sizes in a rank's card, by name."""
    texts = tab.look(
        f"[...document.querySelectorAll('.card')[{rank}].querySelectorAll('.card-bytes span')].map(e => e.textContent)"
    )
    return {text.rsplit(" ", 2)[0]: " ".join(text.rsplit(" ", 2)[1:]) for text in texts}


def each_moment(tab: Tab, rank: int) -> Iterator[int]:
    """Steps through the moments of a rank. The first moment of the run can belong to another rank."""
    tab.press("Home")
    for n in range(len(recordings.find(KEY)["ranks"][rank]["moments"])):
        if n or not tab.look(NOW).startswith(f"Rank {rank}:"):
            tab.click(f"[title='rank {rank}: its next moment']")
        yield n


def size(num: int) -> str:
    """Formats a number of bytes as the page does."""
    if num >= 1e6:
        return f"{num / 1e6:.2f} MB"
    return f"{num / 1e3:.0f} kB" if num >= 1e4 else f"{num / 1e3:.1f} kB" if num >= 1e3 else f"{num} B"


def after(run: dict[str, Any], rank: int, n: int) -> dict[str, int]:
    """The memory of a rank after a moment: the values recorded just before the next one."""
    moments = run["ranks"][rank]["moments"]
    *_, held, adam = moments[min(n + 1, len(moments) - 1)]
    units = run["units"]
    parts = {
        "shards": sum(unit["shard"] for unit in units),
        "Adam": adam,
        "gathered": sum(
            u["bytes"] for u, h in zip(units, held, strict=True) if h[0] != "S" and u["shard"] < u["bytes"]
        ),
        "whole gradients": sum(h[3] for h in held),
        "reduced gradients": sum(h[2] for h in held),
    }
    return {**parts, "together": sum(parts.values())}


# --- moving ---


@in_browser
def test_player_handles_keys_before_the_first_click(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert moment(tab) == 3
    tab.press("ArrowLeft")
    assert moment(tab) == 2
    tab.press("End")
    assert moment(tab) == number(tab)
    tab.press("Home")
    tab.press(" ")
    assert tab.look("document.querySelector('.player-play').textContent") == "Pause"
    tab.wait_for(f"{CLOCK}.startsWith('3 /')")
    tab.press(" ")
    assert tab.look("document.querySelector('.player-play').textContent") == "Play"
    # No element got the focus, and the page did not scroll.
    assert tab.look("[document.activeElement.tagName, scrollY]") == ["BODY", 0]
    assert tab.problems() == []


@in_browser
def test_page_handles_keys_if_the_player_is_not_visible(address: str, tab: Tab) -> None:
    at(tab, address, size="phone")
    tab.look("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
    before = moment(tab)
    tab.press("ArrowRight")
    assert moment(tab) == before


@in_browser
def test_player_moves_by_mouse_and_by_timeline(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.click(".player-button[title='Next event']")
    assert moment(tab) == 2
    seen = set()
    for place in range(0, number(tab), 5):
        tab.choose(".player-slider", str(place))
        seen.add(card(tab, 0)["gathered"])
    # The sawtooth: more than two different amounts of gathered bytes in a step.
    assert len(seen) > 2
    tab.choose(".player-slider", "0")
    tab.click(".player-lanes svg")
    assert 1 < moment(tab) < number(tab)


@in_browser
def test_player_speed_can_be_chosen(address: str, tab: Tab) -> None:
    at(tab, address)
    tab.look(
        "window.delays = []; const real = setTimeout; window.setTimeout = (f, ms) => (delays.push(ms), real(f, ms))"
    )
    for speed in ("0.25", "1", "20"):
        tab.choose("#player-speed", speed)
        tab.look("delays.length = 0; document.querySelector('.player-play').click()")
        tab.wait_for("delays.filter(ms => ms !== 250).length >= 2")
        tab.look("document.querySelector('.player-play').click()")
        assert set(tab.look("delays.filter(ms => ms !== 250)")) == {350 / float(speed)}


@in_browser
def test_player_can_follow_one_rank(address: str, tab: Tab) -> None:
    at(tab, address)
    run = recordings.find(KEY)
    mine = [m[0] for m in run["ranks"][1]["moments"]]
    words = {"AG": "all-gather", "F": "forward", "FREE": "free"}
    for kind, _ in zip(mine[:6], each_moment(tab, 1), strict=False):
        assert tab.look(NOW).startswith(f"Rank 1: {words[kind]}")
    tab.press("1")
    assert words[mine[6]] in tab.look(NOW)
    tab.click("[title='rank 1: its moment before']")
    assert words[mine[5]] in tab.look(NOW)
    tab.press("0")
    assert tab.look(NOW).startswith("Rank 0: ")


@in_browser
def test_every_choice_has_a_recording(address: str, tab: Tab) -> None:
    at(tab, address)
    for selector, value in [
        ("#player-api", "fsdp1"),
        ("#player-strategy", "zero2"),
        ("#player-strategy", "none"),
        ("#player-ranks", "4"),
        ("#player-strategy", "hybrid"),
        ("#player-prefetch", "post"),
        ("#player-wrap", "whole"),
        ("#player-api", "fsdp2"),
    ]:
        tab.choose(selector, value)
        tab.wait_for(f"{STATUS}.includes('moments')")
        assert tab.look(f"document.querySelector('{selector}').value") == value
    assert tab.problems() == []


@in_browser
def test_player_works_from_a_local_file(site: Path, tab: Tab) -> None:
    at(tab, site.as_uri() + "/")
    tab.wait_for("!!document.querySelector('.source-line[aria-current]')")


# --- the address ---


@in_browser
def test_the_address_keeps_run_and_moment(address: str, tab: Tab) -> None:
    at(tab, address, f"#{KEY.replace('fsdp2', 'fsdp1')}/30")
    assert moment(tab) == 30
    assert tab.look("document.getElementById('player-api').value") == "fsdp1"
    tab.press("ArrowRight")
    tab.wait_for("location.hash.endsWith('-2/31')")
    tab.send("Page.reload")
    tab.wait_for(f"document.querySelector('.player-clock') && {CLOCK}.startsWith('31 /')")
    # Change the address while the page is open.
    tab.look(f"location.hash = '#{KEY}/7'")
    tab.wait_for(f"{CLOCK}.startsWith('7 /')")
    assert tab.look("document.getElementById('player-api').value") == "fsdp2"


@in_browser
@pytest.mark.parametrize("hash_", ["#nonsense/3", f"#{KEY}/999999", f"#{KEY}+nonsense", "#how-to-read-it"])
def test_address_with_unknown_run_or_moment_shows_a_valid_moment(address: str, tab: Tab, hash_: str) -> None:
    at(tab, address, hash_)
    assert 1 <= moment(tab) <= number(tab)
    assert tab.problems() == []


# --- the view ---


@in_browser
@pytest.mark.parametrize("key", [KEY, "fsdp1-full-pre-block-2", "fsdp1-hybrid-pre-block-4"])
def test_memory_is_shown_over_time_with_each_ranks_peak(address: str, tab: Tab, key: str) -> None:
    at(tab, address, "#" + key)
    run = recordings.find(key)
    for rank, of_rank in enumerate(run["ranks"]):
        totals = [after(run, rank, n)["together"] for n in range(len(of_rank["moments"]))]
        drawn = tab.look("[...document.querySelectorAll('.track-peak')].map(e => e.textContent)")
        assert drawn[rank] == f"peak {size(max(totals))}"
        tab.look(f"document.querySelectorAll('.card')[{rank}].querySelector('.card-button:last-child').click()")
        assert card(tab, rank)["together"] == size(max(totals))
    # Unsharded and reduced gradients have an area of their own for each rank.
    for part in ("shards", "optimizer", "gathered", "whole", "reduced"):
        shapes = tab.look(f"[...document.querySelectorAll('path.memory-{part}')].map(e => e.getBBox().height)")
        assert len(shapes) == len(run["ranks"])
        assert min(shapes) > 0


@in_browser
def test_card_shows_recorded_bytes_and_unsharded_gradients(address: str, tab: Tab) -> None:
    at(tab, address)
    run = recordings.find(KEY)
    whole = set()
    for n in each_moment(tab, 0):
        expected = after(run, 0, n)
        assert card(tab, 0) == {name: size(num) for name, num in expected.items()}
        whole.add(expected["whole gradients"])
    # Two unsharded gradients at once: one is complete while the previous one is still being reduced.
    assert max(whole) > 2 * 66304


def test_unsharded_gradient_is_recorded_until_reduction_ends() -> None:
    moments = recordings.find("fsdp1-full-pre-block-2")["ranks"][0]["moments"]
    unit = "stage1.block3"
    kinds = [(kind, begins) for kind, name, begins, *_ in moments if name == unit]
    assert kinds.index(("B", False)) < kinds.index(("RS", True)) < kinds.index(("RS", False))
    during = [m[7][4][3] for m in moments if m[1] == unit and (m[0], m[2]) in {("B", False), ("RS", True)}]
    assert during == [66304, 66304]
    assert [m[7][4][3] for m in moments[:20]] == [0] * 20
    assert moments[-1][7][4][2:] == [33152, 0]


@in_browser
def test_the_axis_has_ticks_at_round_times(address: str, tab: Tab) -> None:
    at(tab, address)
    ticks = tab.look("[...document.querySelectorAll('.tick-name')].map(e => [e.textContent, +e.getAttribute('x')])")
    assert ticks[0][0] == "0 ms"
    times = [float(text.split()[0]) for text, _ in ticks]
    places = [x for _, x in ticks]
    assert len(times) >= 4
    steps = {round(b - a, 6) for a, b in itertools.pairwise(times)}
    assert len(steps) == 1
    assert str(steps.pop()).replace(".", "").strip("0")[0] in "125"
    assert places == sorted(places)
    # The cursor is at the time of its moment on the axis.
    tab.press("End")
    ms = float(tab.look(CLOCK).split(" · ")[1].split()[0])
    x = float(tab.look("document.querySelector('.cursor').getAttribute('x')")) + 1
    scale = (places[-1] - places[0]) / (times[-1] - times[0])
    assert x == pytest.approx(places[0] + ms * scale, abs=0.1 * scale)


@in_browser
def test_the_line_that_runs_is_highlighted_on_the_page(address: str, tab: Tab) -> None:
    at(tab, address)
    line = "document.querySelector('.source-line[aria-current]')"
    tab.wait_for(f"!!{line}")
    assert "self.layout.all_gather(self.root.comm_streams)" in tab.look(f"{line}.textContent")
    run = recordings.find(KEY)
    for n in each_moment(tab, 0):
        if not run["ranks"][0]["moments"][n][6]:
            assert "training loop" in tab.look("document.querySelector('.source-way').textContent")
            continue
        # The line is visible inside its box, and the page did not scroll to show it.
        inside = f"""(() => {{ const a = {line}.getBoundingClientRect();
            const b = document.querySelector('.source-box').getBoundingClientRect();
            return b.top <= a.top && a.bottom <= b.bottom; }})()"""
        assert tab.look(inside)
    # The caller: another function, at the line of its call.
    at(tab, address)
    tab.wait_for(f"!!{line}")
    tab.look("document.querySelectorAll('.source-frame')[1].click()")
    assert "unit.unshard()" in tab.look(f"{line}.textContent")
    href = tab.look("document.querySelector('.source-title a').getAttribute('href')")
    assert re.fullmatch(r"\.\./read/engine/hooks\.html#IterationState\.pre_forward.*", href)


@in_browser
@pytest.mark.parametrize("key", ["fsdp1-full-pre-block-2", KEY, "fsdp1-hybrid-pre-block-4", "fsdp1-none-pre-block-2"])
def test_shard_is_drawn_at_its_offset(address: str, tab: Tab, key: str) -> None:
    at(tab, address, "#" + key)
    run = recordings.find(key)
    code = """[...document.querySelectorAll('.card')].map(card => [...card.querySelectorAll('.bar')].map(bar => {
        const whole = bar.getBoundingClientRect();
        return [...bar.querySelectorAll('.bar-shard')].map(e => e.getBoundingClientRect())
            .map(e => [(e.left - whole.left) / whole.width, (e.right - whole.left) / whole.width]); }))"""
    drawn = tab.look(code)
    shards = 2 if key != "fsdp1-none-pre-block-2" else 1
    for unit in range(len(run["units"])):
        of_group = [drawn[rank][unit] for rank in range(shards)]
        assert [len(pieces) for pieces in of_group] == [len(run["ranks"][r]["pieces"][unit]) for r in range(shards)]
        ends = sorted(end for pieces in of_group for end in pieces)
        # Together the shards cover the whole unit, and none overlaps another.
        assert ends[0][0] == pytest.approx(0, abs=0.05)
        assert ends[-1][1] == pytest.approx(1, abs=0.05)
        assert all(a[1] == pytest.approx(b[0], abs=0.02) for a, b in itertools.pairwise(ends))
    if key == "fsdp1-full-pre-block-2":
        assert drawn[1][1][0] == pytest.approx([0.5, 1], abs=0.02)


# --- two runs ---


@in_browser
def test_two_runs_share_one_axis(address: str, tab: Tab) -> None:
    at(tab, address)
    alone = number(tab)
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.player-run').length === 2")
    # The second run has another strategy, and fewer all-gathers.
    assert alone < number(tab) < 2 * alone
    tab.wait_for("document.querySelectorAll('.player-title')[1].textContent.includes('=False')")
    assert "=True" in tab.look("document.querySelector('.player-title').textContent")
    left, right = tab.look(
        "[...document.querySelectorAll('.player-run')].map(run => [...run.querySelectorAll('.tick-name')]"
        ".map(e => [e.textContent, e.getAttribute('x')]))"
    )
    assert left == right
    tab.choose(".player-slider", str(number(tab) // 2))
    cursors = tab.look("[...document.querySelectorAll('.cursor')].map(e => e.getAttribute('x'))")
    assert cursors[0] == cursors[1]
    assert tab.look("[...document.querySelectorAll('.is-here')].length") == 1
    here = moment(tab)
    tab.wait_for(f"location.hash === '#{KEY}+{KEY.replace('full', 'zero2')}/{here}'")
    tab.send("Page.reload")
    tab.wait_for(f"document.querySelector('.player-clock') && {CLOCK}.startsWith('{here} /')")
    assert tab.look("document.querySelectorAll('.card').length") == 4
    tab.click(".player-beside")
    assert number(tab) == alone
    assert tab.problems() == []


@in_browser
def test_player_compares_torch_with_this_package(address: str, tab: Tab) -> None:
    torchs = KEY.replace("fsdp2", "torch2")
    at(tab, address)
    tab.click(".player-versus")
    tab.wait_for(f"location.hash === '#{torchs}+{KEY}/1'")
    titles = tab.look("[...document.querySelectorAll('.player-title')].map(e => e.textContent)")
    assert [title.split(" · ")[0] for title in titles] == ["torch's fully_shard", "fully_shard"]
    assert "torch's own FSDP" in tab.look(STATUS)
    tab.press("End")
    shown = [card(tab, rank) for rank in range(4)]
    assert shown[:2] == shown[2:]
    # A single torch run shows why it has no source.
    at(tab, address, "#" + torchs)
    assert "are not shown" in tab.look("document.querySelector('.source-title').textContent")
    assert tab.problems() == []


# --- visibility ---


@in_browser
@pytest.mark.parametrize("key", [KEY, "fsdp1-full-pre-block-4", "fsdp1-hybrid-pre-block-4", f"{KEY}+{KEY}"])
def test_player_and_cards_are_visible_without_scrolling(address: str, tab: Tab, key: str) -> None:
    at(tab, address, "#" + key + "/40")
    parts = "[...document.querySelectorAll('.player, .player-stage > *, .card')]"
    assert tab.look("document.querySelectorAll('.card').length") == (2 if key == KEY else 4)
    assert tab.look(f"Math.max(...{parts}.map(e => e.getBoundingClientRect().bottom))") <= SIZES["desk"][1]
    assert tab.look("scrollY") == 0


@in_browser
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hash_", [f"#{KEY}/20", f"#{KEY}+fsdp1-hybrid-pre-block-4/20"])
def test_player_content_stays_in_its_frame(address: str, tab: Tab, size: str, hash_: str) -> None:
    at(tab, address, hash_, size)
    assert tab.look("document.documentElement.scrollWidth") <= SIZES[size][0]
    right = "getBoundingClientRect().right"
    out = f"""[...document.querySelectorAll('.player *')].filter(e => !e.closest('.source-box, svg') && e.offsetParent)
        .filter(e => e.{right} > document.querySelector('.player').{right}).map(e => e.className)"""
    assert tab.look(out) == []


PIXELS = """(async (data) => {
    const image = new Image();
    image.src = 'data:image/png;base64,' + data;
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.width, image.height];
    const paper = canvas.getContext('2d');
    paper.drawImage(image, 0, 0);
    const { data: raw } = paper.getImageData(0, 0, image.width, image.height);
    const light = (i) => 0.2126 * raw[i] + 0.7152 * raw[i + 1] + 0.0722 * raw[i + 2];
    return Array.from({ length: raw.length / 4 }, (_, pixel) => light(4 * pixel));
})"""


def lightness(tab: Tab, selector: str) -> list[float]:
    """Lightness of the pixels in the middle of the widest matching element, as they appear on the screen."""
    box = tab.look(
        f"(() => {{ const all = [...document.querySelectorAll('{selector}')].map(e => e.getBoundingClientRect());"
        " const b = all.sort((a, b) => b.width - a.width)[0]; return [b.x, b.y, b.width, b.height]; })()"
    )
    x, y, width, height = box
    clip = {"x": x + 2, "y": y + 1, "width": min(width - 4, 24), "height": max(height - 2, 3), "scale": 1}
    shot = tab.send("Page.captureScreenshot", format="png", clip=clip)["data"]
    return list(tab.look(f"{PIXELS}({json.dumps(shot)})"))


def contrast_within(pixels: list[float]) -> float:
    """Difference in lightness between the darkest and the lightest fifth."""
    in_order = sorted(pixels)
    return in_order[-len(pixels) // 5] - in_order[len(pixels) // 5]


@in_browser
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("kind", ["protanopia", "deuteranopia", "tritanopia", "achromatopsia"])
def test_collectives_differ_for_colour_blind_users(address: str, tab: Tab, kind: str, scheme: str) -> None:
    at(tab, address)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    tab.press("End")
    tab.send("Emulation.setEmulatedVisionDeficiency", type=kind)
    try:
        gather, reduction = lightness(tab, "rect.span-AG"), lightness(tab, "rect.span-RS")
    finally:
        tab.send("Emulation.setEmulatedVisionDeficiency", type="none")
    # One is plain except for a mark on it; the other has light and dark stripes.
    assert contrast_within(gather) < 10
    assert contrast_within(reduction) > 35
    # Each stream has a label.
    names = tab.look("[...document.querySelectorAll('.track-name:not(.track-peak)')].map(e => e.textContent)")
    assert names == ["compute", "gather", "reduce", "memory"] * 2


@in_browser
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("hash_", [f"#{KEY}/60", f"#{KEY}+fsdp1-hybrid-pre-block-4/60"])
def test_every_text_can_be_read(address: str, tab: Tab, scheme: str, hash_: str) -> None:
    at(tab, address, hash_)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    for _ in range(2):
        found = contrasts(tab, ".player *")
        assert len(found) > 60
        assert [(ratio, name) for ratio, name in found if ratio < 4.5] == []
        drop(tab, "wrong.json", "{}")
        tab.wait_for("!!document.querySelector('.is-error')")


@in_browser
def test_every_control_has_a_name_and_no_id_is_there_twice(address: str, tab: Tab) -> None:
    at(tab, address, f"#{KEY}+{KEY}")
    named = "e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length)"
    controls = "[...document.querySelectorAll('.player :is(button, select, input)')]"
    assert tab.look(f"{controls}.filter(e => !({named})).map(e => e.outerHTML)") == []
    twice = "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, n, all) => all.indexOf(id) !== n)"
    assert tab.look(twice) == []


# --- a recording of the user ---


def drop(tab: Tab, name: str, text: str, onto: str = ".player") -> None:
    """Drops a file on an element."""
    tab.look(
        f"""(() => {{ const files = new DataTransfer();
            files.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
            const facts = {{ bubbles: true, cancelable: true, dataTransfer: files }};
            const place = document.querySelector({json.dumps(onto)});
            place.dispatchEvent(new DragEvent('dragover', facts));
            place.dispatchEvent(new DragEvent('drop', facts)); }})()"""
    )


@pytest.fixture(scope="module")
def steps() -> str:
    """The output of ``chrome_trace`` for recorded events."""
    return json.dumps(timeline.chrome_trace(pictures.events_of("fsdp1-full-pre-block-2-wide")))


@in_browser
def test_dropped_trace_file_is_played(address: str, tab: Tab, steps: str) -> None:
    at(tab, address)
    drop(tab, "steps.json", steps)
    tab.wait_for(f"{STATUS}.includes('steps.json')")
    events = pictures.events_of("fsdp1-full-pre-block-2-wide")
    assert number(tab) == sum(1 + (event.end > event.start) for of_rank in events for event in of_rank)
    # The trace has kinds, units, bytes, groups, streams, and the memory of gathered parameters.
    assert tab.look(NOW).startswith("Rank ")
    tab.press("1")
    assert re.fullmatch(r"Rank 1: all-gather of root is issued between ranks 0 and 1, [\d.]+ kB", tab.look(NOW))
    peak = max(num for _, num in timeline.gathered_bytes(events[1]))
    assert tab.look("document.querySelectorAll('.track-peak')[1].textContent") == f"peak {size(peak)}"
    assert set(card(tab, 1)) == {"gathered"}
    # The page lists the missing data, and does not draw it.
    assert "no source lines" in tab.look("document.querySelector('.source-title').textContent")
    assert tab.look("document.querySelectorAll('.bar-shard').length") == 0
    tab.press(" ")
    tab.wait_for(f"Number({CLOCK}.split(' ')[0]) > 3")
    tab.press(" ")
    tab.wait_for("location.hash === ''")
    # Return to the recorded run.
    tab.click(".player-back")
    tab.wait_for(f"{STATUS} === '118 moments on 2 ranks, 5 units.'")
    assert tab.problems() == []


@in_browser
def test_trace_is_opened_by_keyboard_and_compared_with_run(address: str, tab: Tab, steps: str, tmp_path: Path) -> None:
    at(tab, address)
    path = tmp_path / "mine.json"
    path.write_text(steps)
    tab.send("Page.setInterceptFileChooserDialog", enabled=True)
    try:
        tab.look("document.querySelector('.player-open').focus()")
        tab.press(" ")
        for _ in range(40):
            tab.browser.wait(0.05)
            asked = [e for e in tab.browser.events if e.get("method") == "Page.fileChooserOpened"]
            if asked:
                break
        node = asked[0]["params"]["backendNodeId"]
        tab.send("DOM.setFileInputFiles", files=[str(path)], backendNodeId=node)
    finally:
        tab.send("Page.setInterceptFileChooserDialog", enabled=False)
    tab.wait_for(f"{STATUS}.includes('mine.json')")
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.player-run').length === 2")
    # Drop the other file on the second run.
    drop(tab, "other.json", steps, ".player-run[data-slot='1']")
    tab.wait_for("document.querySelectorAll('.player-title')[1].textContent === 'other.json'")
    assert tab.look("document.querySelector('.player-title').textContent") == "mine.json"
    assert tab.problems() == []


@in_browser
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "wrong.json is not JSON, or only the beginning of it"),
        ('{"traceEvents": [{"ph"', "wrong.json is not JSON, or only the beginning of it"),
        ("null", 'wrong.json is JSON, but no trace: it has no list "traceEvents"'),
        ('{"loss": 3}', 'wrong.json is JSON, but no trace: it has no list "traceEvents"'),
        ('{"traceEvents": []}', "wrong.json is a trace without a single event: was the recorder around a step?"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {}}, null]}',
            "wrong.json is a trace of something else: none of its 2 events is one of FSDP's",
        ),
        (
            '{"traceEvents": [{"ph": "X", "cat": "AG", "pid": 0, "ts": 1, "args": {"unit": "0", "bytes": 8}}]}',
            'wrong.json is damaged: event 1, AG 0, has no valid number as "dur"',
        ),
        (
            '{"traceEvents": [{"ph": "i", "cat": "FREE", "pid": 0, "ts": "x", "args": {"unit": "0", "bytes": 8}}]}',
            'wrong.json is damaged: event 1, FREE 0, has no valid number as "ts"',
        ),
    ],
)
def test_wrong_file_shows_error_and_changes_nothing(address: str, tab: Tab, text: str, says: str) -> None:
    at(tab, address, f"#{KEY}/5")
    drop(tab, "wrong.json", text)
    tab.wait_for(f"{STATUS}.includes('wrong.json')")
    said = tab.look(STATUS)
    assert said.startswith(says)
    remedy = "Use a file of train_gpt.py --trace, or of minifsdp_tools.timeline.chrome_trace."
    assert said.endswith(remedy) or "damaged" in said
    assert moment(tab) == 5
    # The status is visible without scrolling right after the page is opened.
    assert 0 < tab.look("document.querySelector('.player-status').getBoundingClientRect().top") < 400
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
