"""With ``recurse=False``, a setting changes the module's own unit and no unit inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import iterate, recorded_iteration
from spec_tests.models.sharding import column_mesh, grid_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, mean_gradients


@pytest.mark.spec("FS2-SYNC-01", "NEW-08")
@pytest.mark.parametrize("mesh", [grid_mesh, column_mesh])
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@ranks(4)
def test_units_inside_are_reduced_over_all_ranks_if_the_root_alone_is_not(
    mesh: Callable[[], Any], setting: str
) -> None:
    """Defect: the setting for the gradients of one unit stops the all-reduce of the units inside it."""
    model = sharded(mesh=mesh())
    getattr(model, setting)(False, recurse=False)
    iterate(model)
    expected = {name: value for name, value in mean_gradients(seeded()).items() if name.startswith("blocks.")}
    assert_same(full_gradients(model), expected, bitwise=False)
    getattr(model, setting)(True, recurse=False)
    iterate(model, 1)
    assert_same(full_gradients(model), mean_gradients(seeded(), (0, 1)), bitwise=False)


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("setting", ["set_reshard_after_forward", "set_reshard_after_backward"])
@ranks(2)
def test_units_inside_are_freed_if_the_root_alone_is_not(setting: str) -> None:
    model = sharded(reshard_after_forward=True)
    getattr(model, setting)(False, recurse=False)
    freed = [word for word in recorded_iteration(model).split() if word.startswith("FREE")]
    assert [freed.count(f"FREE{index}") for index in range(4)] == [2, 2, 2, 2]
    assert freed.count("FREER") == 1
