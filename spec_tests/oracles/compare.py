"""The tolerances for comparisons. All tests use the ones defined here.

Rounding errors in float32 are relative, about ``6e-8`` per operation, and absolute where large numbers cancel. A
`Tolerance` therefore has two numbers: elements ``a`` (ours) and ``b`` (the oracle's) agree if
``|a - b| <= atol + rtol * |b|``. NaN never agrees, not even with NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_tests.harness import device
from spec_tests.oracles.recipe import Record


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed difference between two elements."""

    name: str
    rtol: float
    atol: float


# The same operations on the same numbers in the same order, or in one that does not matter: two ranks, one sum each.
BIT_EQUAL = Tolerance("BIT_EQUAL", rtol=0.0, atol=0.0)
# The same operations on the same numbers, but a kernel may compute them in another way: memory is aligned differently,
# or scalar instructions compute the tail of a vector. After a few steps, a few of the last bits differ.
SAME_MATH = Tolerance("SAME_MATH", rtol=2e-6, atol=2e-7)
# Sums over ranks or micro-batches in a different order: more ranks, or a different accumulation.
FLOAT = Tolerance("FLOAT", rtol=1e-5, atol=1e-6)
# The same in float64. The effect of the last bits in a deep model is still far below the effect of any mistake.
DOUBLE = Tolerance("DOUBLE", rtol=1e-9, atol=1e-10)
# Comparison with float32 if parameters or gradients were in bfloat16 (8 bits) for a few steps. Detects a wrong factor
# or a lost gradient, but not wrong rounding.
LOW_PRECISION = Tolerance("LOW_PRECISION", rtol=0.05, atol=0.02)


def tolerance_for(num_ranks: int) -> Tolerance:
    """The tolerance for float32 training on ``num_ranks`` ranks.

    Measured: on the CPU, every model and every trainer is bitwise equal to the single process on one rank and on two,
    and within `SAME_MATH` on four (``test_oracles.py``). A GPU selects kernels by the alignment of their inputs.
    """
    return BIT_EQUAL if num_ranks <= 2 and device().type == "cpu" else FLOAT


def assert_same_training(
    ours: Record, oracle: Record, tolerance: Tolerance, *, buffers: bool = False, flat: bool = False
) -> None:
    """Checks that two runs have the same losses, the same gradients in the last step and the same final parameters.

    A missing gradient is not zero: with zeros, an optimizer decays a weight that it would otherwise skip.

    Args:
        ours: the run to check.
        oracle: the reference run.
        tolerance: the allowed difference.
        buffers: whether to compare the buffers too. Both records must be from the same rank.
        flat: whether our run has flat parameters and the oracle does not. A flat gradient has zeros for a parameter
            that the oracle has no gradient of.

    Raises:
        AssertionError: if the runs differ. Names the first tensor that differs, and its largest difference.
    """
    if ours.losses.shape != oracle.losses.shape:
        raise AssertionError(
            f"{tuple(ours.losses.shape)} losses (micro-batches, ranks) here, {tuple(oracle.losses.shape)} in the oracle"
        )
    for index, (mine, theirs) in enumerate(zip(ours.losses, oracle.losses, strict=True)):
        _assert_close(f"loss of each rank in micro-batch {index}", mine, theirs, tolerance)
    names = oracle.parameters
    _assert_same_names("parameters", ours.parameters, names)
    gradients = oracle.gradients
    if flat:
        gradients = {name: torch.zeros_like(names[name]) for name in ours.gradients} | gradients
    _assert_same_names("gradients", ours.gradients, gradients)
    _assert_all_close("last gradient of", ours.gradients, gradients, tolerance)
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
    # NaN counts as the largest difference.
    apart = (ours.double() - oracle.double()).abs().nan_to_num(nan=torch.inf).reshape(-1)
    worst = int(apart.where(wrong.reshape(-1), -torch.ones_like(apart)).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape))
    raise AssertionError(
        f"{what} differs in {int(wrong.sum())} of {wrong.numel()} elements. The largest difference is "
        f"{apart[worst].item():.3g}, at {place}: {ours[place].item():.9g} here, {oracle[place].item():.9g} in the "
        f"oracle (allowed: {tolerance.name}, rtol={tolerance.rtol:g}, atol={tolerance.atol:g})"
    )
