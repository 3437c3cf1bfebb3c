"""How equal is equal. The tolerances of the suite are stated here, once.

Rounding in float32 is relative, about ``6e-8`` for each operation, and absolute where large numbers have cancelled each
other. Hence both numbers in a `Tolerance`: two elements ``a`` (ours) and ``b`` (the oracle's) agree if
``|a - b| <= atol + rtol * |b|``. NaN agrees with nothing, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_tests.harness import device
from spec_tests.oracles.recipe import Record

__all__ = [
    "BIT_EQUAL",
    "DOUBLE",
    "FLOAT",
    "LOW_PRECISION",
    "SAME_MATH",
    "Tolerance",
    "assert_same_training",
    "tolerance_for",
]


@dataclass(frozen=True)
class Tolerance:
    """How far two elements may be apart."""

    name: str
    rtol: float
    atol: float


# The same operations on the same numbers in the same order, or in one that cannot matter: two ranks, one sum each.
BIT_EQUAL = Tolerance("BIT_EQUAL", rtol=0.0, atol=0.0)
# The same operations on the same numbers, but a kernel may take another path through them: memory that is aligned
# differently, a vector's tail that is computed by scalar instructions. A few last bits after a few steps.
SAME_MATH = Tolerance("SAME_MATH", rtol=2e-6, atol=2e-7)
# Sums over ranks or micro-batches in another order: more ranks, other accumulation.
FLOAT = Tolerance("FLOAT", rtol=1e-5, atol=1e-6)
# The same in float64. What a deep model makes of the last bits is still far below what any mistake makes of a result.
DOUBLE = Tolerance("DOUBLE", rtol=1e-9, atol=1e-10)
# Against float32, where parameters or gradients went through bfloat16 (8 bits) for a few steps. Finds a wrong factor
# or a lost gradient, not a wrong rounding.
LOW_PRECISION = Tolerance("LOW_PRECISION", rtol=0.05, atol=0.02)


def tolerance_for(num_ranks: int) -> Tolerance:
    """What float32 training on so many ranks can be held to.

    Measured: on the CPU every model and every trainer is bit-equal to the single process on one rank and on two, and
    within `SAME_MATH` on four (``test_oracles.py``). A GPU chooses its kernels by the alignment of what it is given.
    """
    return BIT_EQUAL if num_ranks <= 2 and device().type == "cpu" else FLOAT


def assert_same_training(ours: Record, oracle: Record, tolerance: Tolerance, *, buffers: bool = False) -> None:
    """The two runs had the same losses, the same last gradients and ended with the same parameters.

    A gradient that one side does not have counts as zero: a flat parameter has a gradient for all of its elements.

    Args:
        ours: the run to judge.
        oracle: the run to believe.
        tolerance: how equal they must be.
        buffers: whether to compare the buffers too. Both records must be those of the same rank.

    Raises:
        AssertionError: naming the first thing that differs, and the largest difference in it.
    """
    if ours.losses.shape != oracle.losses.shape:
        raise AssertionError(
            f"{tuple(ours.losses.shape)} losses (micro-batches, ranks) here, {tuple(oracle.losses.shape)} in the oracle"
        )
    for index, (mine, theirs) in enumerate(zip(ours.losses, oracle.losses, strict=True)):
        _assert_close(f"loss of each rank in micro-batch {index}", mine, theirs, tolerance)
    names = oracle.parameters
    _assert_same_names("parameters", ours.parameters, names)
    ours_zeroed = {name: ours.gradients.get(name, torch.zeros_like(names[name])) for name in names}
    oracle_zeroed = {name: oracle.gradients.get(name, torch.zeros_like(names[name])) for name in names}
    _assert_all_close("last gradient of", ours_zeroed, oracle_zeroed, tolerance)
    _assert_all_close("parameter", ours.parameters, oracle.parameters, tolerance)
    if buffers:
        _assert_same_names("buffers", ours.buffers, oracle.buffers)
        _assert_all_close("buffer", ours.buffers, oracle.buffers, tolerance)


def _assert_same_names(what: str, ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> None:
    if ours.keys() != oracle.keys():
        missing, unknown = sorted(oracle.keys() - ours.keys()), sorted(ours.keys() - oracle.keys())
        raise AssertionError(f"{what} differ by name: missing here {missing}, unknown to the oracle {unknown}")


def _assert_all_close(what: str, ours: dict[str, Tensor], oracle: dict[str, Tensor], tolerance: Tolerance) -> None:
    for name, theirs in oracle.items():
        _assert_close(f"{what} {name!r}", ours[name], theirs, tolerance)


def _assert_close(what: str, ours: Tensor, oracle: Tensor, tolerance: Tolerance) -> None:
    if ours.shape != oracle.shape or ours.dtype != oracle.dtype:
        raise AssertionError(
            f"{what}: {ours.dtype} of shape {tuple(ours.shape)} here, {oracle.dtype} of shape {tuple(oracle.shape)} in "
            "the oracle"
        )
    wrong = ~torch.isclose(ours, oracle, rtol=tolerance.rtol, atol=tolerance.atol)
    if not wrong.any():
        return
    # A NaN is the largest difference of all.
    apart = (ours.double() - oracle.double()).abs().nan_to_num(nan=torch.inf).reshape(-1)
    worst = int(apart.where(wrong.reshape(-1), -torch.ones_like(apart)).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape))
    raise AssertionError(
        f"{what} differs in {int(wrong.sum())} of {wrong.numel()} elements. The largest difference is "
        f"{apart[worst].item():.3g}, at {place}: {ours[place].item():.9g} here, {oracle[place].item():.9g} in the "
        f"oracle (allowed: {tolerance.name}, rtol={tolerance.rtol:g}, atol={tolerance.atol:g})"
    )
