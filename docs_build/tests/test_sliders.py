"""The sliders of the player and the calculator, and the placement grid, in a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs_build.pages import placement
from docs_build.tests.browser import Tab

PLAYER, CALCULATOR, GRID = "tools/player.html", "tools/calculator.html", "tools/placement.html"
PANELS = {PLAYER: ".replay", CALCULATOR: ".calc", GRID: ".placement"}


def at(tab: Tab, address: str, page: str, hash_: str = "") -> None:
    """Opens a page and waits for its result."""
    tab.open(address + page + hash_)
    verdict = f"document.querySelector('{PANELS[page]}-verdict')"
    tab.wait_for(f"!!{verdict} && {verdict}.textContent")


def move(tab: Tab, name: str, by: int) -> None:
    """Moves a slider by keys."""
    tab.focus(f"#{name}")
    tab.press(*abs(by) * ["ArrowRight" if by > 0 else "ArrowLeft"])


def value(tab: Tab, name: str) -> str:
    return str(tab.look(f"document.getElementById({json.dumps(name)}).value"))


def numbers(tab: Tab) -> dict[str, str]:
    """The table below the player's sliders."""
    return {row[0]: row[1] for row in tab.each(".replay tbody tr", "[...e.children].map(c => c.textContent)")}


def seconds(shown: str) -> float:
    number, unit = shown.split(",")[0].split()
    return float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.spec("SLIDERS-04")
def test_bandwidth_slider_changes_the_step_by_keyboard_and_mouse(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    before, drawn = numbers(tab), tab.look("document.querySelector('.replay svg').outerHTML")
    # Ten positions are a tenth of the bandwidth.
    move(tab, "replay-bandwidth", -10)
    after = numbers(tab)
    assert seconds(after["step"]) > 1.5 * seconds(before["step"])
    assert after["computation"] == before["computation"]
    assert after["sent by a rank"] == before["sent by a rank"]
    assert tab.look("document.querySelector('.replay svg').outerHTML") != drawn
    tab.click(".replay button")
    assert numbers(tab) == before
    tab.click("#replay-speed")
    assert numbers(tab)["computation"] != before["computation"]
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-04")
def test_page_shows_the_values_of_the_replay_module(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    move(tab, "replay-ranks", 1)
    move(tab, "replay-rows", 2)
    move(tab, "replay-size", 5)
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
    move(tab, "replay-between", -10)
    assert seconds(numbers(tab)["step"]) > seconds(one["step"])
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.replay svg').length === 2")
    tab.choose("#player-strategy-2", "full")
    tab.wait_for(f"!{lanes}[1].includes('all-reduce')")
    # The setting is kept, and both runs have the same axis.
    assert tab.text("#replay-between ~ output") == "10 MB/s"
    ticks = [[label for label in labels if label[0].isdigit()] for labels in tab.look(lanes)]
    assert ticks[0] == ticks[1]
    assert "Right: a step takes" in tab.text(".replay-verdict")
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-05")
@pytest.mark.parametrize("name", ["ranks", "machines", "blocks", "length", "sequences", "within", "between"])
def test_slider_and_number_of_the_calculator_agree(address: str, tab: Tab, name: str) -> None:
    shown = []
    at(tab, address, CALCULATOR)
    move(tab, f"calc-{name}-slider", 1)
    number, position = value(tab, f"calc-{name}"), value(tab, f"calc-{name}-slider")
    shown.append([tab.text(".calc-verdict"), tab.text(".calc-result"), tab.look("location.hash")])
    at(tab, address, CALCULATOR)
    tab.choose(f"#calc-{name}", number)
    shown.append([tab.text(".calc-verdict"), tab.text(".calc-result"), tab.look("location.hash")])
    assert shown[0] == shown[1]
    assert name in shown[0][2]
    assert value(tab, f"calc-{name}-slider") == position


@pytest.mark.spec("SLIDERS-05")
def test_slider_never_leaves_fewer_ranks_than_machines(address: str, tab: Tab) -> None:
    at(tab, address, CALCULATOR, "#ranks=8&machines=4")
    move(tab, "calc-ranks-slider", -2)
    assert [value(tab, f"calc-{name}") for name in ("ranks", "machines")] == ["2", "2"]
    move(tab, "calc-machines-slider", 3)
    assert [value(tab, f"calc-{name}") for name in ("ranks", "machines")] == ["16", "16"]


def size_of(shown: str) -> float:
    number, unit = shown.split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


@pytest.mark.spec("SLIDERS-09", "SLIDERS-07")
@pytest.mark.parametrize(("machines", "per_machine", "keeps"), [(8, 8, False), (1, 8, False), (8, 2, True)])
def test_page_shows_the_numbers_of_each_placement(
    address: str, tab: Tab, machines: int, per_machine: int, *, keeps: bool
) -> None:
    at(tab, address, GRID)
    move(tab, "placement-machines", machines.bit_length() - 4)
    move(tab, "placement-perMachine", per_machine.bit_length() - 4)
    move(tab, "placement-parameters", 2)
    if keeps:
        tab.click("#placement-keeps")
    # Two positions after that of 6.3 billion, which is the nearest to 7 billion.
    parameters = 10e9
    for one in placement.all_placements():
        for state, level in vars(one).items():
            tab.choose(f"#placement-{state}", level)
        facts, said = placement.about(one, reshards=not keeps), tab.text(".placement-verdict")
        if "why" in facts:
            assert tab.each(".placement li") == facts["why"]
            assert said == "This placement is not consistent."
            continue
        states = placement.memory(one, parameters, per_machine, machines)
        assert list(map(size_of, tab.each(".placement-legend b"))) == pytest.approx(list(states.values()), rel=0.006)
        assert said.startswith(facts["name"] or "No common name")
        assert (facts["setting"] or "No setting of minifsdp") in tab.text(".placement-setting")
        rows: list[Any] = tab.each(".placement-traffic tbody tr", "[...e.children].map(x => x.textContent).slice(3)")
        for each, cells in zip(placement.collectives(one, reshards=not keeps), rows, strict=True):
            link = placement.sent(each, parameters, per_machine, machines)
            assert list(map(size_of, cells)) == pytest.approx([link.within, link.between], rel=0.006)
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-09")
def test_grid_works_by_keyboard_and_leads_to_a_consistent_placement(address: str, tab: Tab) -> None:
    at(tab, address, GRID)
    assert len(set(tab.each(".placement-grid button", "e.getAttribute('aria-label')"))) == 27
    tab.look("[...document.querySelectorAll('.placement-grid button')].find(e => e.textContent === 'DDP').focus()")
    tab.press(" ")
    assert tab.text(".placement-verdict").startswith("DDP")
    tab.choose("#placement-gradient", "all")
    assert tab.text(".placement-verdict") == "This placement is not consistent."
    tab.focus(".placement-fix")
    tab.press(" ")
    assert tab.text(".placement-verdict").startswith("ZeRO-2:")


@pytest.mark.parametrize("page", PANELS)
def test_every_slider_has_a_label_a_number_and_the_keyboard(address: str, tab: Tab, page: str) -> None:
    at(tab, address, page)
    facts = "[e.id, !!e.labels.length && !!e.labels[0].textContent.trim(), !!e.getAttribute('aria-valuetext')]"
    found = tab.each(f"{PANELS[page]} input[type=range]", facts)
    assert len(found) >= 3
    for name, has_label, has_number in found:
        assert (has_label, has_number) == (True, True), name
        tab.focus(f"#{name}")
        tab.press("Home")
        first = value(tab, name)
        tab.press("End")
        assert value(tab, name) != first
    assert tab.problems() == []
