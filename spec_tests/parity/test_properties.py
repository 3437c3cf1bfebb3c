"""Several hundred randomly generated training runs with each API; see ``spec_tests/random_programs``.

To run more examples, or others::

    export MINIFSDP_PROPERTY_EXAMPLES=3000 MINIFSDP_PROPERTY_SEED=17
    python -m pytest -s spec_tests/parity/test_properties.py

Each world size runs a fixed fraction of the examples.
"""

from __future__ import annotations

import os

import pytest

from spec_tests.random_programs.description import from_json
from spec_tests.random_programs.draw import drawn
from spec_tests.random_programs.judge import hunt

EXAMPLES = int(os.environ.get("MINIFSDP_PROPERTY_EXAMPLES", "300"))
SEED = int(os.environ.get("MINIFSDP_PROPERTY_SEED", "0"))
# Most examples run on two ranks, where the comparison is bitwise and runs are fast.
PARTS = {1: 0.15, 2: 0.55, 3: 0.1, 4: 0.2}
OF_APIS = {"fsdp1": 1.0, "fully_shard": 0.5}


@pytest.mark.ranks
@pytest.mark.not_simulated("scenarios are drawn for that device, see spec_tests/streams")
@pytest.mark.spec("PAR-01", "PAR-05", "PAR-06", "PAR-07")
@pytest.mark.api_spec(
    wrapper=["SHARD-03", "SHARD-15", "NOSYNC-02", "NOSYNC-03", "OFF-04"],
    fully_shard=["FS2-06", "FS2-13", "FS2-22", "FS2-PREF-08", "FS2-SYNC-01"],
)
@pytest.mark.parametrize("num_ranks", PARTS)
@pytest.mark.parametrize("api", OF_APIS)
def test_any_training_run_equals_one_process(api: str, num_ranks: int) -> None:
    num = max(1, round(EXAMPLES * OF_APIS[api] * PARTS[num_ranks]))
    failure = hunt(drawn("loops", num, SEED, api, str(num_ranks)))
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
def test_earlier_property_findings_are_fixed(case: str) -> None:
    _, line = FOUND[case]
    failure = hunt([from_json(line)])
    if failure is not None:
        pytest.fail(failure, pytrace=False)
