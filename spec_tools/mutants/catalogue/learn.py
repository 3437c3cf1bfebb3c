"""Mutants of the exercises."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- minifsdp_tools/learn/__main__.py ---
    Mutant(
        "start-overwrites",
        "LEARN-01",
        "`start` replaces the file of a learner.",
        never("_start", "path.exists()"),
    ),
    # --- minifsdp_tools/learn/checking.py ---
    Mutant(
        "checks-always-pass",
        "LEARN-04",
        "A condition of a check never fails.",
        never("expect", "not condition"),
    ),
    # --- minifsdp_tools/learn/checks_communication.py ---
    Mutant(
        "limiter-may-wait-for-the-newest",
        "LEARN-04",
        "The check of the rate limiter has no message for a wait for the newest unit.",
        replace("waits_for_oldest", "$waited != [1]", "True"),
    ),
    # --- minifsdp_tools/learn/checks_layout.py ---
    Mutant(
        "padding-is-not-checked",
        "LEARN-04",
        "The padding of a flat shard may have any values.",
        replace("shards_of_example", "torch.equal(shard, right)", "True"),
    ),
    # --- minifsdp_tools/learn/checks_state.py ---
    Mutant(
        "only-the-last-gradient-may-be-kept",
        "LEARN-04",
        "The check of `keep_unreduced` accepts a function that keeps only the last gradient.",
        remove("adds_up", "expect({'overwritten': means == [3.0, 3.0]}, ...)"),
    ),
    # --- minifsdp_tools/learn/checks_step.py ---
    Mutant(
        "summoned-unit-may-gather",
        "LEARN-04",
        "The check of `unshard` accepts an all-gather of a unit that is summoned.",
        remove("unshard_twice", "expect({'summoned': not recorder.mock_calls}, calls=_calls(recorder))"),
    ),
    # --- minifsdp_tools/learn/exercises.py ---
    Mutant(
        "first-hint-only",
        "LEARN-02",
        "`hint` prints the first hint with each call.",
        replace("Progress.next_hints", "min(self.num_hints(exercise) + 1, len(exercise.hints))", "1"),
    ),
    # --- minifsdp_tools/learn/grader.py ---
    Mutant(
        "package-is-graded",
        "LEARN-04",
        "The functions of a learner do not replace those of the package.",
        remove("replace", "setattr(owner, attribute, function)"),
    ),
]
