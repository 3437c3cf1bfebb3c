"""The mutants by sections of the spec. Names are unique."""

from __future__ import annotations

from spec_tests.mutants.catalogue import (
    backward,
    building,
    checkpoints,
    fresh,
    fully_shard,
    fuzz,
    gradients,
    healthy,
    optimizer_states,
    precision,
    rest,
    saving,
    sending,
    sharding,
    start,
    switches,
    training,
    unseen,
)
from spec_tests.mutants.mutant import Mutant

__all__ = ["EVERY", "MUTANTS"]

EVERY: list[Mutant] = [
    *building.MUTANTS,
    *sharding.MUTANTS,
    *backward.MUTANTS,
    *precision.MUTANTS,
    *training.MUTANTS,
    *checkpoints.MUTANTS,
    *optimizer_states.MUTANTS,
    *fully_shard.MUTANTS,
    *gradients.MUTANTS,
    *healthy.MUTANTS,
    *switches.MUTANTS,
    *rest.MUTANTS,
    *sending.MUTANTS,
    *fresh.MUTANTS,
    *fuzz.MUTANTS,
    *saving.MUTANTS,
    *start.MUTANTS,
    *unseen.MUTANTS,
]
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in EVERY}
