"""A process that has done its work ends well, whatever threads of gloo are still doing."""

from __future__ import annotations

import pytest

from spec_tests.engine.apart import said_apart


@pytest.mark.pure
def test_ranks_that_leave_right_after_a_collective_end_with_status_0() -> None:
    # Without the pause at exit about every fifth is ended by SIGABRT.
    assert said_apart("spec_tests.engine.leave", "8") == []
