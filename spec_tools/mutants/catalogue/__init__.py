"""The mutants by folders of the package. Names are unique."""

from __future__ import annotations

from spec_tools.mutants.catalogue import (
    checkpoint,
    engine_communication,
    engine_layouts,
    engine_steps,
    fsdp1,
    fsdp2,
    learn,
    simulate,
    tools,
    watchdog,
)
from spec_tools.mutants.mutant import Mutant

__all__ = ["EVERY", "MUTANTS"]

EVERY: list[Mutant] = [
    *checkpoint.MUTANTS,
    *engine_communication.MUTANTS,
    *engine_layouts.MUTANTS,
    *engine_steps.MUTANTS,
    *fsdp1.MUTANTS,
    *fsdp2.MUTANTS,
    *learn.MUTANTS,
    *simulate.MUTANTS,
    *tools.MUTANTS,
    *watchdog.MUTANTS,
]
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in EVERY}
