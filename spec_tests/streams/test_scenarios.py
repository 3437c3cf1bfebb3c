"""Hundreds of random scenarios: no races, and results that are equal bit by bit in every sampled schedule.

To run others: ``python -m spec_tools.hunt --only scenarios-fsdp1 --only scenarios-fully_shard --minutes 30``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_tests.harness import rank_among_fake_ranks
from spec_tests.random_programs.description import from_json
from spec_tests.random_programs.draw import drawn
from spec_tests.streams.scenarios import play, report, simplest

NUM_SCHEDULES = 3
NUM_ON_USERS_STREAM = 6
NUM_SCENARIOS = {"1": 15, "2": 40, "4": 25, "2x2": 30}


# Each scenario creates a process group of its own size.
@pytest.mark.spec("SIM-06")
@pytest.mark.parametrize("shape", NUM_SCENARIOS)
@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
@rank_among_fake_ranks(1, timeout=300.0)
def test_any_scenario_ends_without_a_collision_and_with_equal_bits_in_other_schedules(api: str, shape: str) -> None:
    for scenario in drawn("races", NUM_SCENARIOS[shape], 0, api, shape):
        if play(scenario, NUM_SCHEDULES).finding is not None:
            pytest.fail(report(simplest(scenario, NUM_SCHEDULES), NUM_SCHEDULES), pytrace=False)


@pytest.mark.spec("SIM-06")
@pytest.mark.parametrize("shape", NUM_SCENARIOS)
@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
@rank_among_fake_ranks(1, timeout=300.0)
def test_scenarios_on_a_stream_of_the_user_end_without_a_collision(api: str, shape: str) -> None:
    for scenario in drawn("races", NUM_ON_USERS_STREAM, 1, api, shape):
        scenario = replace(scenario, aside=True)
        if play(scenario, NUM_SCHEDULES).finding is not None:
            pytest.fail(report(simplest(scenario, NUM_SCHEDULES), NUM_SCHEDULES), pytrace=False)


# Findings of earlier searches, simplified; the keys describe the error.
FOUND = {
    "the CPU unscales offloaded gradients before it has received the scale": (
        '{"model":{"kind":"chain","children":[{"unit":true}]},"offload":true,"scales":true}'
    ),
    "after an error in backward the CPU zeroes gradients that are still being copied to it": (
        '{"model":{"kind":"chain","children":[{"kind":"own"},{"kind":"own","unit":true},{"unit":true}]},'
        '"offload":true,"clears":false,"bomb":"backward","batches":"plain","hook":"plain","saves":"full"}'
    ),
    "where no gradient was reduced the CPU writes to shards that are still copied to the device": (
        '{"model":{"kind":"chain","children":[{"kind":"embedding","frozen":true}]},"originals":true,'
        '"offload":true,"tracks_input":true,"edits":"new_data"}'
    ),
    "an optimizer in backward writes to a shard that a prefetched gather still reads": (
        '{"model":{"kind":"chain","children":[{"kind":"chain","times":2,"checkpoint":"reentrant","children":'
        '[{"kind":"norm","unit":true},{"kind":"norm","unit":true}]}]},"originals":true,"backward_prefetch":'
        '"BACKWARD_POST","micro_batches":[true,true,true],"samples":1,"clears":false,"tracks_input":true,"seed":2,'
        '"reads":true,"stepping":"in_backward","edits":"read"}'
    ),
    "after a forward without a backward the optimizer writes to a shard that was prefetched and never used": (
        '{"model":{"kind":"chain","children":[{"kind":"own","unit":true,"every":2},{"kind":"unused"}]},'
        '"forward_prefetch":true,"clears":false,"evaluates":"forgotten","tracks_input":true}'
    ),
    "the CPU writes to a shard that was prefetched and never used": (
        '{"model":{"kind":"chain","children":[{"unit":true,"checkpoint":"reentrant"},{"unit":true}]},'
        '"api":"fully_shard","originals":true,"backward_prefetch":"","offload":true,"edits":"write","pins":true,'
        '"ahead":2}'
    ),
    "a parameter that forward has read on a stream of the user is freed on the stream of backward": (
        '{"model":{"kind":"chain","children":[{"kind":"linear"}]},"aside":true}'
    ),
}


@pytest.mark.spec("SIM-06")
@pytest.mark.parametrize("case", FOUND)
@rank_among_fake_ranks(1)
def test_earlier_scenario_findings_are_fixed(case: str) -> None:
    assert play(from_json(FOUND[case]), 8).finding is None
