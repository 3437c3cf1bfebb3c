"""Mutants of GRAD: gradients that share memory, mix dtypes, wait for reduction, or belong to converted models."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "reduces-in-shared-memory",
        "FlatLayout.pack",
        "copy=is_written and self._is_shared",
        "copy=False",
        "A gradient that shares memory with another one is reduced in place.",
        "GRAD-01",
    ),
    Mutant(
        "sends-shared-memory-during-backward",
        "Reducer.reduce",
        "plan.overlaps or plan.mesh.shard is None",
        "plan.mesh.shard is None",
        "Other code writes to the memory of a gradient while the gradient is sent.",
        "GRAD-01",
    ),
    Mutant(
        "accumulates-in-shared-memory",
        "FlatLayout.keep_unreduced",
        "gradient.parts[0].clone() if self._is_shared else gradient.parts[0]",
        "gradient.parts[0]",
        "Accumulation writes into memory that belongs to another gradient.",
        "GRAD-01",
    ),
    Mutant(
        "reduces-in-the-dtype-of-the-first",
        "PerParameterLayout._choose_dtype",
        "functools.reduce(torch.promote_types, trained or [self.buckets[0].dtype])",
        "(trained or [self.buckets[0].dtype])[0]",
        "A unit reduces in the dtype of its first parameter.",
        "GRAD-02",
    ),
    Mutant(
        "casts-complex-parameters",
        "Precision.computes_in",
        "if stored.is_floating_point else stored",
        "if stored.is_floating_point or stored.is_complex else stored",
        "Complex parameters are cast to a real dtype.",
        "GRAD-02",
    ),
    Mutant(
        "zero-grad-keeps-waiting-gradients",
        "FSDPModule.zero_grad",
        "_discard_unreduced(units)",
        "pass",
        "zero_grad() keeps gradients that wait for their reduction.",
        "GRAD-03",
    ),
    Mutant(
        "keeps-the-dtype-before-a-conversion",
        "RootState._prepare",
        "if unit.layout.dtype is not unit.planned_for:",
        "if False:",
        "A converted model reduces in its old dtype.",
        "GRAD-04",
    ),
    Mutant(
        "stream-context-is-not-a-stack",
        "CommStream.__exit__",
        "self._contexts.pop().__exit__(",
        "self._contexts[-1].__exit__(",
        "Leaving a stream that was entered twice restores the wrong stream.",
        "GRAD-05",
        "simulated",
    ),
]
