"""The placement grid: its numbers equal those of the calculator, and the page shows the numbers of the module."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from docs_build.pages import placement
from docs_build.pages.placement import LEVELS, NAMES, SETTINGS, Placement, all_placements, collectives, reasons
from minifsdp_tools.cost import Job, cost_of, num_collectives, sent_by_link

# The strategy of minifsdp for each setting, and the size of its shard group.
STRATEGIES = {
    "rrr": ("NO_SHARD", "one"),
    "www": ("HYBRID_SHARD", "machine"),
    "www*": ("_HYBRID_SHARD_ZERO2", "machine"),
    "aaa": ("FULL_SHARD", "all"),
    "aaa*": ("SHARD_GRAD_OP", "all"),
}
MACHINES = [(1, 4), (2, 1), (2, 4), (8, 8)]  # machines, and ranks on each


def of(key: str) -> Placement:
    return Placement(*(next(level for level in LEVELS if level[0] == letter) for letter in key[:3]))


@pytest.mark.spec("SLIDERS-07")
def test_ten_of_all_placements_are_consistent() -> None:
    assert len({one.key for one in all_placements()}) == 27
    good = {one.key for one in all_placements() if not reasons(one)}
    assert good == {key for key in NAMES if not key.endswith("*")}
    assert len(good) == 10
    for one in all_placements():
        better = placement.consistent(one)
        assert reasons(better) == []
        assert (better == one) == (one.key in good)
        # The consistent placement stores nothing more.
        both = [sum(placement.memory(each, 1e9, 8, 4).values()) for each in (one, better)]
        assert both[1] <= both[0]


@pytest.mark.spec("SLIDERS-08")
@pytest.mark.parametrize(("machines", "per_machine"), MACHINES)
@pytest.mark.parametrize("key", STRATEGIES)
@pytest.mark.parametrize("per_parameter", [False, True])
def test_numbers_of_a_setting_equal_those_of_the_calculator(
    key: str, machines: int, per_machine: int, *, per_parameter: bool
) -> None:
    strategy, group = STRATEGIES[key]
    shards = {"one": 1, "machine": per_machine, "all": per_machine * machines}[group]
    units = [[(64, 5), (64,)]] * 3
    job = Job(
        units=units,
        strategy=strategy,
        num_shards=shards,
        num_replicas=per_machine * machines // shards,
        per_parameter=per_parameter,
    )
    one, numel = of(key), 3 * 64 * 6
    assert sum(placement.memory(one, numel, per_machine, machines).values()) == pytest.approx(
        cost_of(job).after_backward
    )
    links = sent_by_link(job, per_machine)
    found = collectives(one, reshards=not key.endswith("*"))
    for kind in ("AG", "RS", "AR"):
        sends = [placement.sent(each, numel, per_machine, machines) for each in found if each.kind == kind]
        within, between = sum(link.within for link in sends), sum(link.between for link in sends)
        assert (within, between) == pytest.approx((links[kind].within, links[kind].between)), kind
        # All units take part in each collective. The calculator does not count those of a single rank.
        times = sum(each.times for each, link in zip([e for e in found if e.kind == kind], sends, strict=True))
        if within + between:
            assert times * len(units) == num_collectives(job)[kind], kind


@pytest.mark.spec("SLIDERS-08")
def test_only_placements_of_a_setting_have_one() -> None:
    assert STRATEGIES.keys() == SETTINGS.keys()
    for one in all_placements():
        for reshards in (True, False):
            facts = placement.about(one, reshards=reshards)
            assert ("why" in facts) == bool(reasons(one))
            if "why" not in facts:
                is_diagonal = len(set(asdict(one).values())) == 1
                assert (facts["setting"] is not None) == is_diagonal, one
                assert facts["name"] or not is_diagonal


@pytest.mark.spec("SLIDERS-07")
def test_zero_stages_send_the_bytes_of_the_paper() -> None:
    """In multiples of the model, on many ranks: 2 for DDP and ZeRO-2, 3 for ZeRO-3 (arXiv 1910.02054, section 7)."""
    multiples = {}
    for key in ("rrr", "rra", "raa", "aaa"):
        links = [placement.sent(each, 1e9, 8, 1024) for each in collectives(of(key), reshards=True)]
        multiples[key] = round(sum(link.within + link.between for link in links) / 4e9, 2)
    # With an all-reduce, ZeRO-1 sends a half more than with a reduce-scatter.
    assert multiples == {"rrr": 2, "rra": 3, "raa": 2, "aaa": 3}
    stored = {key: sum(placement.memory(of(key), 7.5e9, 8, 8).values()) / 1e9 for key in ("rrr", "rra", "raa", "aaa")}
    assert stored == pytest.approx({"rrr": 120, "rra": 60.9375, "raa": 31.40625, "aaa": 1.875})
