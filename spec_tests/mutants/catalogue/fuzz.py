"""Mutants of FUZZ: wrong numbers that the randomly generated programs must find."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "a-fused-step-leaves-flat-units-as-they-are",
        "FlatLayout.is_stale",
        "self._gathered_at != (self.steps.count, self.owner.stamp())",
        "self._gathered_at[1] != self.owner.stamp()",
        "A forward after the step of a fused optimizer uses the parameters from before the step.",
        "FUZZ-12",
    ),
]
