"""Random programs on the simulated device: no races, and equal bits in every sampled schedule."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from spec_tests.harness import rank_among_fake_ranks
from spec_tests.random_programs import races
from spec_tests.random_programs.description import from_json
from spec_tests.random_programs.draw import drawn
from spec_tests.random_programs.judge import failure_of

NUM_PROGRAMS = {"1": 10, "2": 30, "4": 15, "2x2": 20}
judged = functools.partial(races.judged, num_schedules=3)


# Each program creates a process group of its own size.
@pytest.mark.spec("SIM-06")
@pytest.mark.parametrize("shape", NUM_PROGRAMS)
@pytest.mark.parametrize("api", ["wrapped", "fully_shard"])
@rank_among_fake_ranks(1, timeout=300.0)
def test_any_program_ends_without_a_race_and_with_equal_bits_in_other_schedules(api: str, shape: str) -> None:
    programs = drawn("races", NUM_PROGRAMS[shape], 0, api, shape)
    on_users_stream = [replace(program, aside=True) for program in drawn("races", 6, 1, api, shape)]
    failure = failure_of([*programs, *on_users_stream], judged)
    if failure is not None:
        pytest.fail(failure, pytrace=False)


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
def test_earlier_findings_are_fixed(case: str) -> None:
    (verdict,) = races.judged([from_json(FOUND[case])])
    assert verdict.found is None
