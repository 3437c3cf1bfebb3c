"""Mutants of START: a new machine, and names that other programs use."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "a-folder-called-minifsdp-is-the-package",
        "warn",
        'frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:',
        '"minifsdp" in frame.f_code.co_filename:',
        "A warning looks for the package's name in the paths of files.",
        "START-01",
    ),
]
