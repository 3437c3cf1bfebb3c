"""The placement grid: its numbers equal those of the calculator, and its page shows these numbers."""

from __future__ import annotations

from typing import Any

import pytest

from docs_build.pages import placement
from docs_build.pages.placement import NAMES, SETTINGS, Placement, all_placements, collectives, reasons
from docs_build.tests.browser import Tab
from minifsdp_tools.cost import Job, cost_of, num_collectives, sent_by_link

# The strategy of minifsdp for each setting, and the size of its shard group.
STRATEGIES = {
    "rrr": ("NO_SHARD", "one"),
    "www": ("HYBRID_SHARD", "machine"),
    "www*": ("_HYBRID_SHARD_ZERO2", "machine"),
    "aaa": ("FULL_SHARD", "all"),
    "aaa*": ("SHARD_GRAD_OP", "all"),
}
BY_KEY: dict[str, Placement] = {one.key: one for one in all_placements()}
PAGE = "tools/placement.html"


@pytest.mark.spec("SLIDERS-07")
def test_ten_of_all_placements_are_consistent() -> None:
    assert len(BY_KEY) == 27
    good = {key for key, one in BY_KEY.items() if not reasons(one)}
    assert good == {key for key in NAMES if not key.endswith("*")}
    assert len(good) == 10
    for key, one in BY_KEY.items():
        better = placement.consistent(one)
        assert reasons(better) == []
        assert (better == one) == (key in good)


@pytest.mark.spec("SLIDERS-08")
@pytest.mark.parametrize(("machines", "per_machine"), [(1, 4), (2, 1), (8, 8)])
@pytest.mark.parametrize("key", STRATEGIES)
@pytest.mark.parametrize("per_parameter", [False, True])
def test_numbers_of_a_setting_equal_those_of_the_calculator(
    key: str, machines: int, per_machine: int, *, per_parameter: bool
) -> None:
    strategy, group = STRATEGIES[key]
    shards = {"one": 1, "machine": per_machine, "all": per_machine * machines}[group]
    units, replicas = [[(64, 5), (64,)]] * 3, per_machine * machines // shards
    job = Job(units, strategy=strategy, num_shards=shards, num_replicas=replicas, per_parameter=per_parameter)
    one, numel = BY_KEY[key[:3]], 3 * 64 * 6
    held = placement.memory(one, numel, per_machine, machines)
    assert sum(held.values()) == pytest.approx(cost_of(job).after_backward)
    links = sent_by_link(job, per_machine)
    for kind in ("AG", "RS", "AR"):
        found = [each for each in collectives(one, reshards=not key.endswith("*")) if each.kind == kind]
        sends = [placement.sent(each, numel, per_machine, machines) for each in found]
        within, between = sum(link.within for link in sends), sum(link.between for link in sends)
        assert (within, between) == pytest.approx((links[kind].within, links[kind].between)), kind
        # All units take part in each collective. The calculator does not count those of a single rank.
        if within + between:
            assert sum(each.times for each in found) * len(units) == num_collectives(job)[kind], kind


@pytest.mark.spec("SLIDERS-08")
def test_only_placements_with_the_same_level_for_all_states_have_a_setting() -> None:
    assert STRATEGIES.keys() == SETTINGS.keys()
    for key, one in BY_KEY.items():
        facts = placement.about(one, reshards=True)
        assert ("why" in facts) == bool(reasons(one))
        assert "why" in facts or (facts["setting"] is not None) == (len(set(key)) == 1)


# ---- in a browser ----


def opened(tab: Tab, address: str) -> None:
    tab.open(address + PAGE)
    tab.wait_for("!!document.querySelector('.placement-verdict').textContent")


def size_of(shown: str) -> float:
    number, unit = shown.split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


@pytest.mark.spec("SLIDERS-09", "SLIDERS-07")
@pytest.mark.parametrize(("machines", "keeps"), [(8, False), (1, False), (8, True)])
def test_page_shows_the_numbers_of_each_placement(address: str, tab: Tab, machines: int, *, keeps: bool) -> None:
    opened(tab, address)
    tab.move("placement-machines", machines.bit_length() - 4)
    # Two positions after that of 6.3 billion parameters, which is the nearest to 7 billion.
    tab.move("placement-parameters", 2)
    job = (10e9, 8, machines)
    if keeps:
        tab.click("#placement-keeps")
    for one in all_placements():
        for state, level in vars(one).items():
            tab.choose(f"#placement-{state}", level)
        facts, said = placement.about(one, reshards=not keeps), tab.text(".placement-verdict")
        if "why" in facts:
            assert tab.each(".placement li") == facts["why"]
            assert said == "This placement is not consistent."
            continue
        shown = list(map(size_of, tab.each(".placement-legend b")))
        assert shown == pytest.approx(list(placement.memory(one, *job).values()), rel=0.006)
        assert said.startswith(facts["name"] or "No common name")
        assert (facts["setting"] or "No setting of minifsdp") in tab.text(".placement-setting")
        rows: list[Any] = tab.each(".placement-traffic tbody tr", "[...e.children].map(x => x.textContent).slice(3)")
        for each, cells in zip(collectives(one, reshards=not keeps), rows, strict=True):
            link = placement.sent(each, *job)
            assert list(map(size_of, cells)) == pytest.approx([link.within, link.between], rel=0.006)
    assert tab.problems() == []


@pytest.mark.spec("SLIDERS-09")
def test_grid_works_by_keyboard_and_leads_to_a_consistent_placement(address: str, tab: Tab) -> None:
    opened(tab, address)
    assert len(set(tab.each(".placement-grid button", "e.getAttribute('aria-label')"))) == 27
    tab.look("[...document.querySelectorAll('.placement-grid button')].find(e => e.textContent === 'DDP').focus()")
    tab.press(" ")
    assert tab.text(".placement-verdict").startswith("DDP")
    tab.choose("#placement-gradient", "all")
    assert tab.text(".placement-verdict") == "This placement is not consistent."
    tab.focus(".placement-fix")
    tab.press(" ")
    assert tab.text(".placement-verdict").startswith("ZeRO-2:")
