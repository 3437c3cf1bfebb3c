"""``FlatParameter``: a class for ``isinstance`` checks of flat parameters.

A flat parameter is an ordinary ``nn.Parameter`` with a marker attribute. Scripts use ``isinstance(p, FlatParameter)``
to exclude flat parameters from weight decay or to count elements. This class implements ``isinstance`` with the marker.
Torch's class of the same name checks the same attribute, so each class recognizes the flat parameters of both packages.

Worked example, ``FSDP(Linear(3, 3))`` on two ranks::

    use_orig_params=False    parameters() has one of 6 elements      isinstance returns True
    use_orig_params=True     parameters() has weight and bias        isinstance returns False for both

*In torch:* ``FlatParameter`` in ``_flat_param.py``. It has about twenty attributes that describe the sharding. Here,
the layout stores this information, and the parameter has none of these attributes.

Spec: ORIG-01, ORIG-02.
"""

import torch
from torch import nn


class _MarkerCheck(type(nn.Parameter)):  # type: ignore[misc]
    """Metaclass that makes ``isinstance`` check the marker attribute."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_MarkerCheck):
    """A unit's local shard with ``use_orig_params=False``. Use the class only for ``isinstance`` checks.

    Args:
        data: its values, 1-D.
        requires_grad: whether it requires gradients.
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Creates an ordinary parameter with the marker attribute."""
        parameter = nn.Parameter(data, requires_grad)  # type: ignore[arg-type]
        parameter._is_flat_param = True  # type: ignore[attr-defined]
        return parameter
