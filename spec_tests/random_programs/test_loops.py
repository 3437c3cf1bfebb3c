"""Random training loops with each API.

To run others::

    python -m spec_tests.random_programs loops --seed 17 --minutes 30
"""

from __future__ import annotations

import pytest

from spec_tests.random_programs.description import from_json
from spec_tests.random_programs.draw import drawn
from spec_tests.random_programs.judge import failure_of

# By number of ranks. Most programs run on two ranks, where the comparison is bitwise and runs are fast.
NUM_PROGRAMS = {1: 4, 2: 20, 3: 3, 4: 5}


@pytest.mark.ranks
@pytest.mark.not_simulated("scenarios are drawn for that device, see test_races.py")
@pytest.mark.spec("PAR-01", "PAR-05", "PAR-06", "PAR-07", "HEALTHY-01")
@pytest.mark.api_spec(
    wrapper=["SHARD-03", "SHARD-15", "NOSYNC-02", "NOSYNC-03", "OFF-04"],
    fully_shard=["FS2-06", "FS2-13", "FS2-22", "FS2-PREF-08", "FS2-SYNC-01"],
)
@pytest.mark.parametrize("api", ["wrapped", "fully_shard"])
def test_any_training_loop_equals_one_process(api: str) -> None:
    programs = [d for num_ranks, number in NUM_PROGRAMS.items() for d in drawn("loops", number, 0, api, str(num_ranks))]
    failure = failure_of(programs)
    if failure is not None:
        pytest.fail(failure, pytrace=False)


# Minimized failures of earlier runs: the defect, the requirement that it violated, and the program.
FOUND = {
    "a frozen unit that becomes part of another tree": (
        "CTOR-11",
        '{"model":{"kind":"chain","children":[{"kind":"one_sided","unit":true,"frozen":true}]},"apart":0}',
    ),
    "zero_grad(set_to_none=False) on an unreduced gradient, with a stored reduced one": (
        "FWD-08",
        '{"model":{"kind":"chain","children":[{"kind":"norm"}]},"micro_batches":[false,true],"clears":false,'
        '"bomb":"forward","bomb_at":1}',
    ),
    "the same with original parameters": (
        "FWD-08",
        '{"model":{"kind":"chain","children":[{"kind":"norm"}]},"micro_batches":[false,true],"clears":false,'
        '"bomb":"forward","bomb_at":1,"originals":true}',
    ),
    "a unit that stays unsharded, empty on one rank: only the other ranks noticed the step and gathered": (
        "ORIG-05",
        '{"model":{"kind":"chain","children":[{"kind":"linear","unit":true},{"kind":"own","size":1,"unit":true}]},'
        '"strategy":"SHARD_GRAD_OP","originals":true,"evaluates":"forgotten"}',
    ),
}


# Their optimizers zero gradients with list operators.
NOT_SIMULATED = {"FWD-08": [pytest.mark.not_simulated("list operators do not change the versions of its tensors")]}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.spec(row), *NOT_SIMULATED.get(row, [])])
        for case, (row, _) in FOUND.items()
    ],
)
def test_earlier_findings_are_fixed(case: str) -> None:
    _, line = FOUND[case]
    failure = failure_of([from_json(line)])
    if failure is not None:
        pytest.fail(failure, pytrace=False)
