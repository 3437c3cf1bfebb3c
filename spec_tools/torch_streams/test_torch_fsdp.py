"""Runs the race checker on torch's own FSDP1 and FSDP2: it finds the known races and no others.

The results are for torch 2.13.0. ``torch-findings.md`` explains the races.
"""

from __future__ import annotations

import os

import pytest

from spec_tests.harness import rank_among_fake_ranks, simulated
from spec_tools.torch_streams.torch_fsdp import OPTIONS, PROGRAMS, Program, sharded, train
from spec_tools.torch_streams.torch_hazards import HAZARDS, by_chunks, forgetting, with_head

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning"),
]
WORLD = simulated.WORLD
waits_or_not = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])


def collisions(program: Program) -> set[tuple[str, str]]:
    """The later and the earlier operator of each race. Clears the races, so that they do not fail the test."""
    program()
    found = {(race.new.operator, race.old.operator) for race in WORLD.races.values() if race.old}
    WORLD.races.clear()
    return found


def names(num_ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, (number, _) in PROGRAMS.items() if number == num_ranks])


def run(name: str) -> None:
    # Reports show the lines of torch's FSDP. The test harness asserts after each body that there are no races.
    WORLD.look_at(f"{os.sep}fsdp{os.sep}")
    PROGRAMS[name][1]()
    assert WORLD.num_operations > 50


@pytest.mark.spec("SIM-10")
@names(1)
@rank_among_fake_ranks(1)
def test_fsdps_of_torch_have_no_races_on_one_rank(name: str) -> None:
    run(name)


@pytest.mark.spec("SIM-10")
@names(2)
@rank_among_fake_ranks(2)
def test_fsdps_of_torch_have_no_races_on_two_ranks(name: str) -> None:
    run(name)


@pytest.mark.spec("SIM-10")
@names(4)
@rank_among_fake_ranks(4)
def test_fsdps_of_torch_have_no_races_on_four_ranks(name: str) -> None:
    run(name)


@pytest.mark.spec("SIM-10")
@pytest.mark.parametrize("name", HAZARDS)
@rank_among_fake_ranks(2)
def test_torch_fsdp_has_exactly_the_expected_races(name: str) -> None:
    _, program, expected = HAZARDS[name]
    assert collisions(program) == expected


SCATTER = "reduce_scatter_single"


@pytest.mark.spec("SIM-09")
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("plain", set()),  # the reduced tensor is the gradient itself, so it stays alive
        ("bf16", set()),
        ("bf16 reduction", {(SCATTER, "_to_copy")}),
        ("offload", {(SCATTER, "_to_copy between devices")}),
        ("bf16 reduction, offload", {(SCATTER, "_to_copy")}),
    ],
)
@rank_among_fake_ranks(4)
def test_race_of_pull_request_180665_is_found_without_the_kept_reference(
    option: str, expected: set[tuple[str, str]]
) -> None:
    with forgetting("_all_reduce_state"):
        assert collisions(lambda: train(sharded(2, **OPTIONS[option]))) == expected


@pytest.mark.spec("SIM-09")
@waits_or_not
@pytest.mark.parametrize("option", OPTIONS)
@rank_among_fake_ranks(2)
def test_partial_groups_need_no_wait_if_the_reduction_inputs_are_kept(option: str, waits: bool) -> None:
    # Answers torch's TODO #181218: there is no race without the wait that was added for partial groups.
    assert collisions(lambda: by_chunks(with_head(**OPTIONS[option]), waits=waits)) == set()


@pytest.mark.spec("SIM-09")
@waits_or_not
@rank_among_fake_ranks(4)
def test_partial_groups_with_replicas_need_no_wait(waits: bool) -> None:
    assert collisions(lambda: by_chunks(with_head(2, **OPTIONS["bf16 reduction"]), waits=waits)) == set()


@pytest.mark.spec("SIM-09")
@waits_or_not
@rank_among_fake_ranks(2)
def test_kept_inputs_prevent_races_of_torch_groups(waits: bool) -> None:
    found = collisions(lambda: by_chunks(with_head(), waits=waits, keeps=False))
    assert {earlier for _, earlier in found} == {SCATTER}
