"""How far two correct computations of a sum may differ."""

from __future__ import annotations

import torch


def tolerance(dtype: torch.dtype, num_terms: int = 1) -> float:
    """The largest relative difference between two results of ``num_terms`` rounded operations in ``dtype``.

    One operation rounds by at most half of ``eps``, so each of the two results is off by at most
    ``num_terms * eps / 2``, and they differ by at most ``num_terms * eps``. For a sum of numbers of both signs, it is
    relative to the sum of the absolute values.
    """
    return num_terms * torch.finfo(dtype).eps
