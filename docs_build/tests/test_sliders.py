"""The sliders of the player and the calculator, and the placement grid, in a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from docs_build.pages import placement
from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts
from docs_build.tests.test_calculator import in_script
from docs_build.tests.test_placement import of
from minifsdp_tools.cost import Job, activation_bytes, cost_of, operations

browser = [pytest.mark.docs, pytest.mark.needs("mkdocs")]
SIZES = {"phone": (390, 844), "desk": (1280, 900)}
PLAYER, CALCULATOR, GRID = "tools/player.html", "tools/calculator.html", "tools/placement.html"
VERDICTS = {PLAYER: ".replay-verdict", CALCULATOR: ".calc-verdict", GRID: ".placement-verdict"}
PANELS = {PLAYER: ".replay", CALCULATOR: ".calc", GRID: ".placement"}
RANGES = "[...document.querySelectorAll('{} input[type=range]')].filter(e => e.offsetParent)"


def at(tab: Tab, address: str, page: str, hash_: str = "") -> Tab:
    """Opens a page and waits for its result."""
    tab.open("about:blank")
    tab.open(address + page + hash_)
    tab.wait_for(
        f"!!document.querySelector('{VERDICTS[page]}') && document.querySelector('{VERDICTS[page]}').textContent"
    )
    return tab


def text(tab: Tab, selector: str) -> str:
    return str(tab.look(f"document.querySelector({json.dumps(selector)}).textContent"))


def move(tab: Tab, name: str, by: int) -> None:
    """Moves a slider by keys."""
    tab.look(f"document.getElementById({json.dumps(name)}).focus()")
    for _ in range(abs(by)):
        tab.press("ArrowRight" if by > 0 else "ArrowLeft")


def numbers(tab: Tab) -> dict[str, str]:
    """The table below the player's sliders."""
    rows = "[...document.querySelectorAll('.replay tbody tr')].map(e => [...e.children].map(c => c.textContent))"
    return {name: value for name, value, *_ in tab.look(rows)}


def seconds(shown: str) -> float:
    number, unit = shown.split(",")[0].split()
    return float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


# --- the player ---


@pytest.mark.spec("SLIDERS-04")
@browser[0]
@browser[1]
def test_bandwidth_slider_changes_the_step_by_keyboard_and_mouse(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    before = numbers(tab)
    drawn = tab.look("document.querySelector('.replay svg').outerHTML")
    # Ten positions are a tenth of the bandwidth.
    move(tab, "replay-bandwidth", -10)
    assert tab.look("document.querySelector('#replay-bandwidth ~ output').textContent") == "100 MB/s"
    after = numbers(tab)
    assert seconds(after["step"]) > 1.5 * seconds(before["step"])
    assert after["computation"] == before["computation"]
    assert after["sent by a rank"] == before["sent by a rank"]
    assert tab.look("document.querySelector('.replay svg').outerHTML") != drawn
    ratio = seconds(after["step"]) / seconds(before["step"])
    said = text(tab, ".replay-verdict")
    assert float(said.partition(", ")[2].split()[0]) == pytest.approx(ratio, rel=0.01)
    # The player itself has not moved.
    assert text(tab, ".player-clock").startswith("1 /")
    tab.click(".replay button")
    assert numbers(tab) == before
    middle = "b => [b.left + 3, b.top + b.height / 2]"
    box = tab.look(f"({middle})(document.querySelector('#replay-speed').getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        tab.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
    assert seconds(numbers(tab)["computation"]) > 10 * seconds(before["computation"])
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-04")
@browser[0]
@browser[1]
def test_page_shows_the_values_of_the_replay_module(address: str, tab: Tab) -> None:
    at(tab, address, PLAYER)
    move(tab, "replay-ranks", 1)
    move(tab, "replay-rows", 2)
    move(tab, "replay-size", 5)
    code = """(() => {
        const settings = { perMachine: 2, bandwidth: 1e9, between: 1e8, latency: 5e-5, speed: 1e10, rows: 128,
            size: 3.2, width: 4, ranks: 4, shards: 4, replicas: 1, ahead: false };
        const run = minifsdpPlayer.fromSite('', '', window.seenRun);
        return minifsdpReplay.replay(run.ranks[0], run.units, settings);
    })()"""
    tab.look(
        """new Promise((done) => { const before = window.minifsdpRun;
        window.minifsdpRun = (key, data) => { window.seenRun = data; window.minifsdpRun = before; done(true); };
        const script = document.createElement('script');
        script.src = document.getElementById('player').dataset.runs + 'fsdp2-full-pre-block-2.js';
        document.head.append(script); })"""
    )
    found = tab.look(code)
    shown = numbers(tab)
    for name, key in {"step": "step", "computation": "computation", "exposed communication": "exposed"}.items():
        assert seconds(shown[name]) == pytest.approx(found[key], rel=0.005)
    assert tab.look("document.querySelectorAll('.replay svg rect').length") == len(found["spans"])


@pytest.mark.spec("SLIDERS-04")
@browser[0]
@browser[1]
def test_sliders_follow_the_selected_runs(address: str, tab: Tab) -> None:
    key = "fsdp1-hybrid-pre-block-4"
    at(tab, address, PLAYER, f"#{key}")
    texts = "s => [...s.querySelectorAll('text')].map(e => e.textContent)"
    lanes = f"[...document.querySelectorAll('.replay svg')].map({texts})"
    assert {"compute", "gather", "reduce", "all-reduce"} <= set(tab.look(lanes)[0])
    assert tab.look("document.getElementById('replay-between').offsetParent !== null")
    one = numbers(tab)
    move(tab, "replay-between", -10)
    assert seconds(numbers(tab)["step"]) > seconds(one["step"])
    tab.choose("#player-strategy", "full")
    tab.wait_for(f"!{lanes}[0].includes('all-reduce')")
    # The setting is kept, and a second run has the same axis.
    assert tab.look("document.querySelector('#replay-between ~ output').textContent") == "10 MB/s"
    tab.click(".player-beside")
    tab.wait_for("document.querySelectorAll('.replay svg').length === 2")
    tab.choose("#player-strategy-2", "hybrid")
    tab.wait_for(f"{lanes}[1].includes('all-reduce')")
    ticks = [[label for label in labels if label[0].isdigit()] for labels in tab.look(lanes)]
    assert ticks[0] == ticks[1]
    said = text(tab, ".replay-verdict")
    assert said.startswith("Left: a step takes")
    assert "Right: a step takes" in said
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-04")
@browser[0]
@browser[1]
@pytest.mark.parametrize("start", ["gpus", "machines"])
def test_start_values_of_gpus_run_ahead_with_large_units(address: str, tab: Tab, start: str) -> None:
    at(tab, address, PLAYER)
    tab.choose("#replay-start", start)
    assert tab.look("document.getElementById('replay-ahead').checked")
    assert "M parameters" in tab.look("document.querySelector('#replay-size ~ output').textContent")
    ahead = seconds(numbers(tab)["step"])
    tab.click("#replay-ahead")
    assert seconds(numbers(tab)["step"]) > ahead
    in_float32 = numbers(tab)["sent by a rank"]
    tab.choose("#replay-width", "4")
    assert float(numbers(tab)["sent by a rank"].split()[0]) == pytest.approx(2 * float(in_float32.split()[0]), rel=0.01)


# --- the calculator ---


@pytest.mark.spec("SLIDERS-05")
@browser[0]
@browser[1]
def test_slider_and_number_of_the_calculator_agree(address: str, tab: Tab) -> None:
    at(tab, address, CALCULATOR)
    sliders = tab.look(f"{RANGES.format('.calc')}.map(e => e.id.slice(5, -7))")
    assert sliders == ["ranks", "machines", "blocks", "length", "sequences", "within", "between"]
    for name in sliders:
        at(tab, address, CALCULATOR)
        move(tab, f"calc-{name}-slider", 1)
        number = tab.look(f"document.getElementById('calc-{name}').value")
        by_slider = [text(tab, ".calc-verdict"), text(tab, ".calc-result"), tab.look("location.hash")]
        assert name in by_slider[2]
        at(tab, address, CALCULATOR)
        tab.choose(f"#calc-{name}", number)
        if name == "machines":
            assert number == "2"
        assert [text(tab, ".calc-verdict"), text(tab, ".calc-result"), tab.look("location.hash")] == by_slider
        position = tab.look(f"document.getElementById('calc-{name}-slider').value")
        tab.look(f"document.getElementById('calc-{name}-slider').focus()")
        tab.press("ArrowLeft")
        tab.press("ArrowRight")
        assert tab.look(f"document.getElementById('calc-{name}-slider').value") == position
        assert tab.look(f"document.getElementById('calc-{name}').value") == number
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-05")
@browser[0]
@browser[1]
def test_slider_never_leaves_fewer_ranks_than_machines(address: str, tab: Tab) -> None:
    at(tab, address, CALCULATOR, "#ranks=8&machines=4")
    values = "['ranks', 'machines'].map(name => document.getElementById('calc-' + name).value)"
    move(tab, "calc-ranks-slider", -2)
    assert tab.look(values) == ["2", "2"]
    move(tab, "calc-machines-slider", 3)
    assert tab.look(values) == ["16", "16"]
    assert tab.look("document.querySelectorAll('[aria-invalid=true]').length") == 0
    move(tab, "calc-between-slider", -20)
    assert tab.look("document.getElementById('calc-between').value") == "5"


@pytest.mark.spec("SLIDERS-06")
@pytest.mark.parametrize("blocks", [1, 3, 8, 100])
def test_joined_blocks_have_the_costs_of_joined_units(blocks: int) -> None:
    code = """const { read } = inputs.readAll(inputs.fromAddress("#ranks=16&machines=2&blocks=" + given));
        console.log(JSON.stringify([read.model, inputs.answer(read).strategies]))"""
    model, answers = in_script(code, blocks)
    units = model["units"]
    several = [list(chain(*units[n : n + blocks])) for n in range(0, len(units), blocks)]
    for found in answers:
        shards, replicas = {"NO_SHARD": (1, 16), "FULL_SHARD": (16, 1), "SHARD_GRAD_OP": (16, 1)}.get(
            found["strategy"], (8, 2)
        )
        job = Job(
            units=units,
            root=model["root"],
            strategy=found["strategy"],
            num_shards=shards,
            num_replicas=replicas,
            per_parameter=True,
            compute=torch.bfloat16,
        )
        activations = activation_bytes(job, 4096, checkpointing=True)
        cost = cost_of(replace(job, units=several, activations=activations))
        assert found["peak"] == pytest.approx(cost.peak)
        assert found["priced"]["sent"] == pytest.approx(cost.sent)
        assert found["priced"]["numCollectives"] == cost.num_collectives
        assert found["count"] == operations(job, 4096, checkpointing=True)


# --- the placement grid ---


def size_of(shown: str) -> float:
    number, unit = shown.split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def placements_on_page(tab: Tab) -> dict[str, Any]:
    """Selects each placement of the grid, and returns what the page shows, by key."""
    code = """(() => {
        const found = {};
        const choose = (id, value) => {
            const e = document.getElementById(id);
            e.value = value;
            e.dispatchEvent(new Event('change'));
        };
        const levels = ['replicated', 'within', 'all'];
        for (const a of levels) for (const b of levels) for (const c of levels) {
            choose('placement-parameter', a); choose('placement-gradient', b); choose('placement-optimizer', c);
            const rows = [...document.querySelectorAll('.placement-traffic tbody tr')];
            const cells = rows.map(e => [...e.children].map(x => x.textContent));
            found[a[0] + b[0] + c[0]] = {
                verdict: document.querySelector('.placement-verdict').textContent, cells,
                states: [...document.querySelectorAll('.placement-legend b')].map(e => e.textContent),
                setting: (document.querySelector('.placement-setting') || {}).textContent || '',
                reasons: [...document.querySelectorAll('.placement li')].map(e => e.textContent),
                pressed: [...document.querySelectorAll('[aria-pressed=true]')].length,
            };
        }
        return found;
    })()"""
    return dict(tab.look(code))


@pytest.mark.spec("SLIDERS-09", "SLIDERS-07")
@browser[0]
@browser[1]
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
    found = placements_on_page(tab)
    assert len(found) == 27
    # Two positions after that of 6.3 billion, which is the nearest to 7 billion.
    assert text(tab, "#placement-parameters ~ output") == "10 B"
    parameters = 10e9
    for key, shown in found.items():
        facts = placement.about(of(key), reshards=not keeps)
        assert shown["pressed"] == 1
        if "why" in facts:
            assert shown["reasons"] == facts["why"], key
            assert shown["verdict"] == "This placement is not consistent."
            continue
        states = placement.memory(of(key), parameters, per_machine, machines)
        assert [size_of(size) for size in shown["states"]] == pytest.approx(list(states.values()), rel=0.006), key
        assert shown["verdict"].startswith(facts["name"] or "No common name")
        assert (facts["setting"] or "No setting of minifsdp") in shown["setting"]
        for one, cells in zip(placement.collectives(of(key), reshards=not keeps), shown["cells"], strict=True):
            link = placement.sent(one, parameters, per_machine, machines)
            assert [size_of(cell) for cell in cells[3:]] == pytest.approx([link.within, link.between], rel=0.006), key
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-09")
@browser[0]
@browser[1]
def test_grid_works_by_keyboard_and_leads_to_a_consistent_placement(address: str, tab: Tab) -> None:
    at(tab, address, GRID)
    assert text(tab, ".placement-verdict").startswith("ZeRO-3, FULL_SHARD")
    cells = "[...document.querySelectorAll('.placement-grid button')]"
    assert tab.look(f"{cells}.length") == 27
    tab.look(f"{cells}.find(e => e.textContent === 'DDP').focus()")
    tab.press(" ")
    assert text(tab, ".placement-verdict").startswith("DDP")
    assert tab.look("document.getElementById('placement-gradient').value") == "replicated"
    tab.choose("#placement-gradient", "all")
    assert text(tab, ".placement-verdict") == "This placement is not consistent."
    tab.look("document.querySelector('.placement-fix').focus()")
    tab.press(" ")
    assert text(tab, ".placement-verdict").startswith("ZeRO-2:")
    # Each cell contains its placement in words.
    labels = tab.look(f"{cells}.map(e => e.getAttribute('aria-label'))")
    assert len(set(labels)) == 27
    assert (
        "ZeRO-2: parameter replicated, gradient sharded over all ranks, optimizer state sharded over all ranks"
        in labels
    )


# --- all three ---


@browser[0]
@browser[1]
@pytest.mark.parametrize("page", PANELS)
def test_every_slider_has_a_label_a_number_and_the_keyboard(address: str, tab: Tab, page: str) -> None:
    at(tab, address, page)
    ranges = RANGES.format(PANELS[page])
    nameless = f"{ranges}.filter(e => !e.labels.length || !e.labels[0].textContent.trim()).map(e => e.id)"
    assert tab.look(nameless) == []
    silent = f"{ranges}.filter(e => !e.getAttribute('aria-valuetext')).map(e => e.id)"
    assert tab.look(silent) == []
    shown = tab.look(f"{ranges}.map(e => e.id)")
    assert len(shown) >= 3
    for name in shown:
        tab.look(f"document.getElementById({json.dumps(name)}).focus()")
        tab.press("Home")
        first = tab.look(f"document.getElementById({json.dumps(name)}).value")
        tab.press("End")
        assert tab.look(f"document.getElementById({json.dumps(name)}).value") != first
        # The focus is visible.
        assert tab.look("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert tab.problems() == []


@browser[0]
@browser[1]
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("page", [PLAYER, GRID])
def test_every_text_next_to_the_sliders_can_be_read(address: str, tab: Tab, page: str, scheme: str) -> None:
    at(tab, address, page)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    found = contrasts(tab, f"{PANELS[page]} *")
    assert len(found) > 20
    assert [(ratio, name) for ratio, name in found if ratio < 4.5] == []


@browser[0]
@browser[1]
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PANELS)
def test_panels_with_sliders_are_not_wider_than_the_screen(address: str, tab: Tab, page: str, size: str) -> None:
    tab.resize(*SIZES[size])
    try:
        at(tab, address, page)
        assert tab.look("document.documentElement.scrollWidth") <= SIZES[size][0]
        right = "getBoundingClientRect().right"
        panel = f"document.querySelector('{PANELS[page]}')"
        is_inside = "!e.closest('[role=region], svg, details') && e.offsetParent"
        inside = f"[...{panel}.querySelectorAll('*')].filter(e => {is_inside})"
        assert tab.look(f"{inside}.filter(e => e.{right} > {panel}.{right} + 1).map(e => e.className)") == []
    finally:
        tab.resize(*SIZES["desk"])
