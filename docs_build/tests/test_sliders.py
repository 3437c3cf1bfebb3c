"""The sliders of the player and of the calculator, in a browser."""

from __future__ import annotations

import pytest

from docs_build.tests.browser import Tab

PANELS = {"tools/player.html": ".replay", "tools/calculator.html": ".calc", "tools/placement.html": ".placement"}
PLAYER, CALCULATOR, _ = PANELS
PICTURE = "document.querySelector('.replay svg').outerHTML"


def at(tab: Tab, address: str, page: str, hash_: str = "") -> None:
    """Opens a page and waits for its result."""
    tab.open(address + page + hash_)
    verdict = f"document.querySelector('{PANELS[page]}-verdict')"
    tab.wait_for(f"!!{verdict} && {verdict}.textContent")


def numbers(tab: Tab) -> dict[str, str]:
    """The table below the player's sliders."""
    return {row[0]: row[1] for row in tab.each(".replay tbody tr", "[...e.children].map(c => c.textContent)")}


def seconds(shown: str) -> float:
    number, unit = shown.split(",")[0].split()
    return float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.spec("SLIDERS-04")
def test_bandwidth_slider_changes_the_step_by_keyboard_and_mouse(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    before, drawn = numbers(tab), tab.look(PICTURE)
    # Ten positions are a tenth of the bandwidth.
    tab.move("replay-bandwidth", -10)
    after = numbers(tab)
    assert seconds(after["step"]) > 1.5 * seconds(before["step"])
    assert after["computation"] == before["computation"]
    assert after["sent by a rank"] == before["sent by a rank"]
    assert tab.look(PICTURE) != drawn
    tab.click(".replay button")
    assert numbers(tab) == before
    tab.click("#replay-speed")
    assert numbers(tab)["computation"] != before["computation"]
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-04")
def test_page_shows_the_values_of_the_replay_module(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    tab.move("replay-ranks", 1)
    tab.move("replay-rows", 2)
    tab.move("replay-size", 5)
    found = tab.look(
        """new Promise((done) => { const before = window.minifsdpRun;
        const settings = { perMachine: 2, bandwidth: 1e9, between: 1e8, latency: 5e-5, speed: 1e10, rows: 128,
            size: 3.2, width: 4, ranks: 4, shards: 4, replicas: 1, ahead: false };
        window.minifsdpRun = (key, data) => { window.minifsdpRun = before;
            const run = minifsdpPlayer.fromSite('', '', data);
            done(minifsdpReplay.replay(run.ranks[0], run.units, settings)); };
        const script = document.createElement('script');
        script.src = document.getElementById('player').dataset.runs + 'fsdp2-full-pre-block-2.js';
        document.head.append(script); })"""
    )
    shown = numbers(tab)
    for name, key in {"step": "step", "computation": "computation", "exposed communication": "exposed"}.items():
        assert seconds(shown[name]) == pytest.approx(found[key], rel=0.005)


@pytest.mark.spec("SLIDERS-04")
def test_sliders_follow_the_selected_runs(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER, "#fsdp1-hybrid-pre-block-4")
    texts = "s => [...s.querySelectorAll('text')].map(e => e.textContent)"
    lanes = f"[...document.querySelectorAll('.replay svg')].map({texts})"
    assert {"compute", "gather", "reduce", "all-reduce"} <= set(tab.look(lanes)[0])
    one = numbers(tab)
    tab.move("replay-between", -10)
    assert seconds(numbers(tab)["step"]) > seconds(one["step"])
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.replay svg').length === 2")
    tab.choose("#player-strategy-2", "full")
    tab.wait_for(f"!{lanes}[1].includes('all-reduce')")
    # The setting is kept, and both runs have the same axis.
    assert tab.text("#replay-between ~ output") == "10 MB/s"
    ticks = [[label for label in labels if label[0].isdigit()] for labels in tab.look(lanes)]
    assert ticks[0] == ticks[1]
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-05")
@pytest.mark.parametrize("name", ["ranks", "machines", "blocks", "length", "sequences", "within", "between"])
def test_slider_and_number_of_the_calculator_agree(address: str, tab: Tab, name: str) -> None:
    at(tab, address, CALCULATOR)
    tab.move(f"calc-{name}-slider", 1)
    number, position = tab.value(f"calc-{name}"), tab.value(f"calc-{name}-slider")
    shown = [tab.text(".calc-verdict"), tab.text(".calc-result"), tab.look("location.hash")]
    assert name in shown[2]
    at(tab, address, CALCULATOR)
    tab.choose(f"#calc-{name}", number)
    assert [tab.text(".calc-verdict"), tab.text(".calc-result"), tab.look("location.hash")] == shown
    assert tab.value(f"calc-{name}-slider") == position


@pytest.mark.spec("SLIDERS-05")
def test_slider_never_leaves_fewer_ranks_than_machines(address: str, tab: Tab) -> None:
    at(tab, address, CALCULATOR, "#ranks=8&machines=4")
    tab.move("calc-ranks-slider", -2)
    assert [tab.value(f"calc-{name}") for name in ("ranks", "machines")] == ["2", "2"]
    tab.move("calc-machines-slider", 3)
    assert [tab.value(f"calc-{name}") for name in ("ranks", "machines")] == ["16", "16"]
