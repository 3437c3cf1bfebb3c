"""The definition of a mutant, and its application to the package."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from spec_tests.harness.accounting import ROOT
from spec_tests.harness.edit import Edit, Edited

__all__ = ["PACKAGES", "Mutant", "broken"]

PACKAGES = (ROOT / "minifsdp", ROOT / "minifsdp_gloo", ROOT / "minifsdp_tools")


@dataclass(frozen=True)
class Mutant:
    """One behavior that is removed from the package.

    Attributes:
        name: short, with dashes.
        rows: the requirements whose tests must fail, separated by spaces.
        what: one sentence about the broken behavior.
        edit: the change of a function or class.
        device: the device of these tests, ``cpu`` or ``simulated``.
    """

    name: str
    rows: str
    what: str
    edit: Edit
    device: str = "cpu"

    @property
    def row_list(self) -> list[str]:
        """The requirements as a list."""
        return self.rows.split()


@functools.cache
def broken(mutant: Mutant) -> Edited:
    """The file of the mutant with the change applied.

    Raises:
        ValueError: the edit cannot be applied.
    """
    try:
        return mutant.edit.apply(*PACKAGES)
    except ValueError as error:
        raise ValueError(f"{mutant.name}: {error}") from error
