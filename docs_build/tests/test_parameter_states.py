"""The page "In which state is this parameter now?": its record, its tables, and a new run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import parameter_states, records
from docs_build.recording.parameter_states import FORMS, IN_BACKWARD, IN_FORWARD, NAME, SETTINGS, Setting
from spec_tests.harness import ranks

PAGE = (ROOT / "docs" / "parameter-states.md").read_text(encoding="utf-8")
COMPUTING = (IN_FORWARD, IN_BACKWARD)
AVAILABLE = ("inside `summon_full_params()`", "after `unshard()`")
NO_GRAD = "after a forward in `torch.no_grad()`"
WITH_GRADIENT = ("after backward", "after `optimizer.step()`", "after `state_dict()`")


@pytest.mark.spec("STATE-05")
@pytest.mark.cpu
@ranks(2)
def test_recorded_states_are_those_of_a_new_run() -> None:
    # The moments have an order, too.
    assert json.dumps(parameter_states.observe_all()) == json.dumps(records.load(NAME)["settings"])


def moments_of(form: str) -> list[tuple[Setting, str, dict[str, Any], int]]:
    """All recorded moments of a form after sharding: setting, moment, facts, rank."""
    settings = records.load(NAME)["settings"]
    return [
        (setting, moment, seen, rank)
        for setting in SETTINGS
        if setting.form == form
        for rank, observed in enumerate(settings[setting.key])
        for moment, seen in observed["moments"].items()
        if moment != "before sharding"
    ]


def is_unsharded(setting: Setting, moment: str) -> bool:
    """Whether the block has its unsharded parameters."""
    is_kept = moment == "after forward" and not setting.reshard_after_forward
    return moment in (*COMPUTING, *AVAILABLE) or is_kept


@pytest.mark.spec("STATE-01")
def test_flat_parameters_are_registered_except_inside_summon() -> None:
    for _, moment, seen, _ in moments_of("flat"):
        is_summoned = moment in AVAILABLE
        assert seen["is_held"] is not is_summoned
        shape = "(3, 4); (3, 4)" if is_summoned else "(8,); (8,)"
        assert seen["parameter"] == f"Parameter; {shape}; float32"
        if moment in COMPUTING:
            assert seen["module"] == "Tensor; (3, 4); (3, 4); bfloat16"
        elif not is_summoned:
            assert seen["module"] == "placeholder; (3, 4); (3, 4); float32"


@pytest.mark.spec("STATE-01")
def test_original_parameters_are_parts_of_the_flat_shard_between_computations() -> None:
    for setting, moment, seen, rank in moments_of("original"):
        # The flat shards have 8 elements, and the weight has 12.
        size = (8, 4)[rank]
        expected = f"Parameter; ({size},); ({size},); float32"
        if moment in AVAILABLE:
            expected = "Parameter; (3, 4); (3, 4); float32"
        elif is_unsharded(setting, moment):
            expected = "Tensor; (3, 4); (3, 4); bfloat16"
        assert seen["parameter"] == seen["module"] == expected
        assert seen["is_held"] is (moment in AVAILABLE or not is_unsharded(setting, moment))


@pytest.mark.spec("STATE-02")
def test_parameters_of_fully_shard_have_the_original_shape_at_each_moment() -> None:
    for setting, moment, seen, rank in moments_of("fully_shard"):
        unsharded = is_unsharded(setting, moment)
        assert seen["is_held"] is not unsharded
        sharded = f"DTensor; (3, 4); ({(2, 1)[rank]}, 4); float32"
        expected = "Parameter; (3, 4); (3, 4); bfloat16" if unsharded else sharded
        assert seen["parameter"] == seen["module"] == expected


@pytest.mark.spec("STATE-03")
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_the_optimizers_parameters_are_shards(form: str) -> None:
    for _, moment, seen, _ in moments_of(form):
        if moment in WITH_GRADIENT:
            assert seen["is_held"]
            assert seen["grad"].split("; ")[1:] == seen["parameter"].split("; ")[1:]
        elif seen["is_held"] and moment not in (*AVAILABLE, "after `summon_full_params()`", "after `reshard()`"):
            assert seen["grad"] is None


@pytest.mark.spec("STATE-04")
@pytest.mark.parametrize("form", FORMS)
def test_unsharded_memory_is_allocated_only_while_it_is_needed(form: str) -> None:
    for setting, moment, seen, _ in moments_of(form):
        is_kept = moment in (NO_GRAD, "after forward") and not setting.reshard_after_forward
        expected = ["root"] if moment in (NO_GRAD, "after forward") and form != "fully_shard" else []
        if moment in (*COMPUTING, *AVAILABLE) or is_kept:
            expected = ["block", "root"]
        assert seen["allocated"] == expected, (setting, moment)


@pytest.mark.spec("STATE-06")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_page_has_a_row_for_each_recorded_moment(setting: Setting) -> None:
    ranks_of_setting = records.load(NAME)["settings"][setting.key]
    for moment in ranks_of_setting[0]["moments"].keys() - {"before sharding"}:
        # A cell has the values of both ranks if they differ.
        seen = [of_rank["moments"][moment]["parameter"].split("; ") for of_rank in ranks_of_setting]
        kind, shape, local, dtype = (list(dict.fromkeys(values)) for values in zip(*seen, strict=True))
        shapes = [" / ".join(f"`{value}`" for value in values) for values in (shape, local)]
        assert f"| {moment} | {' / '.join(kind)} | {' | '.join(shapes)} | {' / '.join(dtype)} |" in PAGE
