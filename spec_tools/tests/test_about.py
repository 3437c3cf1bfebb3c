"""``python -m pytest --about TOPICS`` lists the tests that are about all of the topics."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spec_tests.harness import accounting
from spec_tests.harness.about import TOPICS, pattern_of


def listed(topics: str) -> list[str]:
    """The names that the command lists, without those of the parameters."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--about", topics]
    output = subprocess.run(command, cwd=accounting.ROOT, capture_output=True, text=True, check=True).stdout
    return [line.split("[")[0].split("::")[1] for line in output.splitlines() if "::" in line]


def test_the_list_has_what_is_about_all_topics_and_nothing_else() -> None:
    found = listed("no_sync, fully_shard, precision")
    assert "test_unreduced_gradients_add_up_in_the_dtype_of_the_reduction" in found
    assert "test_a_setting_applies_to_inner_units_by_default_and_may_be_changed_for_one" not in found, (
        "that test is not about precision"
    )


def test_a_variant_of_both_apis_is_only_about_its_own_api() -> None:
    name = "test_shards_gradients_and_optimizer_state_are_on_the_cpu"
    both = listed("state_are_on_the_cpu").count(name)
    one = listed("state_are_on_the_cpu, fully_shard").count(name)
    other = listed("state_are_on_the_cpu, wrapper").count(name)
    assert 0 < one < both
    assert one + other == both


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_occurs_in_the_suite(topic: str) -> None:
    pattern = pattern_of(topic)
    assert any(pattern.search(path.read_text(encoding="utf-8")) for path in accounting.test_files()), topic
