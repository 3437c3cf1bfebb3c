"""Mutants of FUZZ: wrong numbers that the randomly generated programs must find."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "a-fused-step-leaves-flat-units-as-they-are",
        "FlatLayout.is_stale",
        "self._last_all_gather != (self.steps.count, self.registered.stamp())",
        "self._last_all_gather[1] != self.registered.stamp()",
        "A forward after the step of a fused optimizer uses the parameters from before the step.",
        "FUZZ-12",
    ),
]
