"""Checks the record of replays without one wait, hook or free, and executes a sample of them again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spec_tools.breaks import counterfactuals
from spec_tools.breaks.counterfactuals import CHOSEN, RECORD, Counterfactual

RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
ENTRIES = {entry["name"]: entry for entry in RECORDED["entries"]}
OUTDATED = "if the engine was changed on purpose: python -m spec_tools.breaks.counterfactuals"
# One of each group and layout: a wait, a free and a hook.
SAMPLE = ("forward-does-not-wait", "buffer-given-back-at-once", "inputs-are-not-watched")

NAME, ROW, COLUMN, WRONG, WRITTEN, USED = range(6)


def num_collectives(entry: dict[str, Any]) -> int:
    return sum(box[NAME].startswith(("AG", "RS")) for box in entry["boxes"])


@pytest.mark.spec("COUNTERFACTUAL-01")
@pytest.mark.parametrize("one", CHOSEN, ids=lambda one: one.name)
def test_texts_and_code_of_the_record_are_current(one: Counterfactual) -> None:
    found = counterfactuals.described(one)
    recorded = ENTRIES[one.name]
    assert found == {key: recorded[key] for key in found}, OUTDATED
    assert any(line.startswith("- ") for line in found["code"])


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("COUNTERFACTUAL-01")
@pytest.mark.parametrize("name", SAMPLE)
def test_replay_of_a_broken_engine_equals_the_record(name: str) -> None:
    one = next(one for one in CHOSEN if one.name == name)
    assert counterfactuals.entry(one) == ENTRIES[name], OUTDATED


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("COUNTERFACTUAL-01")
def test_replay_of_the_intact_engine_equals_the_record() -> None:
    models = {counterfactuals.intact_key(one): one for one in CHOSEN}
    assert {key: counterfactuals.replay(one) for key, one in models.items()} == RECORDED["intact"], OUTDATED


@pytest.mark.spec("COUNTERFACTUAL-02")
def test_replay_of_the_intact_engine_has_no_race_and_no_wrong_element() -> None:
    for replay in RECORDED["intact"].values():
        assert replay["race"] is None
        assert replay["error"] == ""
        assert sum(box[WRONG] for box in replay["boxes"]) == replay["wrong"][0] == 0


@pytest.mark.spec("COUNTERFACTUAL-02")
@pytest.mark.parametrize("one", [one for one in CHOSEN if ENTRIES[one.name]["race"]], ids=lambda one: one.name)
def test_without_a_wait_an_early_operation_gives_wrong_elements(one: Counterfactual) -> None:
    entry = ENTRIES[one.name]
    boxes, race = entry["boxes"], entry["race"]
    (new, *_), (old, *_) = race["new"], race["old"]
    assert boxes[new][COLUMN] < boxes[old][COLUMN]
    # No result is wrong before the early operation, and the parameters are wrong at the end.
    first_wrong = min(box[COLUMN] for box in boxes if box[WRONG])
    assert first_wrong >= boxes[new][COLUMN]
    assert 0 < entry["wrong"][0] <= entry["wrong"][1]
    # The step has the collectives of the intact engine.
    assert num_collectives(entry) == num_collectives(RECORDED["intact"][entry["model"]])


@pytest.mark.spec("COUNTERFACTUAL-03")
@pytest.mark.parametrize("name", ["kept-after-backward", "inputs-are-not-watched", "unlimited-gathers"])
def test_without_a_free_hook_or_limit_the_values_are_correct_and_the_peak_is_higher(name: str) -> None:
    entry = ENTRIES[name]
    whole = RECORDED["intact"][entry["model"]]
    assert entry["race"] is None
    assert sum(box[WRONG] for box in entry["boxes"]) == entry["wrong"][0] == 0
    assert entry["peak"] > whole["peak"]
    assert max(box[USED] for box in entry["boxes"]) > max(box[USED] for box in whole["boxes"])
