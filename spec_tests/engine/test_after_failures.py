"""An iteration that failed leaves nothing behind that the next iteration uses."""

from __future__ import annotations

import pytest

from minifsdp.engine.schedule import Schedule
from spec_tests.engine.test_schedule import iterate, units


@pytest.mark.pure
@pytest.mark.spec("PREF-12", "NEW-15")
def test_after_a_failed_first_iteration_the_next_one_records_the_order() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    schedule.enter(a)
    schedule.enter(b)
    schedule.abandon_iteration()
    assert schedule.next_forward(a) is None
    iterate(schedule, a, b, c)
    assert [schedule.next_forward(unit) for unit in (a, b, c)] == [b, c, None]
