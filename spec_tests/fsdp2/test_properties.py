"""Random training runs with ``fully_shard``; see ``spec_tests/fsdp1/test_properties.py``.

To run more examples, or other ones::

    MINIFSDP_PROPERTY_EXAMPLES=3000 MINIFSDP_PROPERTY_SEED=17 python -m pytest -s spec_tests/fsdp2/test_properties.py
"""

from __future__ import annotations

import pytest

from spec_tests.fsdp1.test_properties import EXAMPLES, PARTS, SEED
from spec_tests.random_programs.draw import drawn
from spec_tests.random_programs.judge import hunt


@pytest.mark.ranks
@pytest.mark.not_simulated("scenarios are drawn for that device, see spec_tests/streams")
@pytest.mark.spec("PAR-05", "PAR-06", "FS2-06", "FS2-13", "FS2-22", "FS2-PREF-08", "FS2-SYNC-01")
@pytest.mark.parametrize("num_ranks", PARTS)
def test_any_training_run_equals_one_process(num_ranks: int) -> None:
    num = max(1, round(EXAMPLES / 2 * PARTS[num_ranks]))
    failure = hunt(drawn("loops", num, SEED, "fully_shard", str(num_ranks)))
    if failure is not None:
        pytest.fail(failure, pytrace=False)
