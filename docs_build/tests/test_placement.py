"""The placement grid: its numbers equal those of the calculator."""

from __future__ import annotations

import pytest

from docs_build.pages import placement
from docs_build.pages.placement import NAMES, SETTINGS, Placement, all_placements, collectives, reasons
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
        # The consistent placement stores nothing more.
        both = [sum(placement.memory(each, 1e9, 8, 4).values()) for each in (one, better)]
        assert both[1] <= both[0]


@pytest.mark.spec("SLIDERS-08")
@pytest.mark.parametrize(("machines", "per_machine"), [(1, 4), (2, 1), (2, 4), (8, 8)])
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
        for reshards in (True, False):
            facts = placement.about(one, reshards=reshards)
            assert ("why" in facts) == bool(reasons(one))
            assert "why" in facts or (facts["setting"] is not None) == (len(set(key)) == 1)


@pytest.mark.spec("SLIDERS-07")
def test_zero_stages_send_the_bytes_of_the_paper() -> None:
    """In multiples of the model, on many ranks: 2 for DDP and ZeRO-2, 3 for ZeRO-3 (arXiv 1910.02054, section 7)."""
    multiples = {}
    for key in ("rrr", "rra", "raa", "aaa"):
        links = [placement.sent(each, 1e9, 8, 1024) for each in collectives(BY_KEY[key], reshards=True)]
        multiples[key] = round(sum(link.within + link.between for link in links) / 4e9, 2)
    # With an all-reduce, ZeRO-1 sends a half more than with a reduce-scatter.
    assert multiples == {"rrr": 2, "rra": 3, "raa": 2, "aaa": 3}
    stored = {key: sum(placement.memory(BY_KEY[key], 7.5e9, 8, 8).values()) / 1e9 for key in multiples}
    assert stored == pytest.approx({"rrr": 120, "rra": 60.9375, "raa": 31.40625, "aaa": 1.875})
