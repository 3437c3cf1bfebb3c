"""``FlatParameter``: the type that scripts ask for, without a type behind it.

A flat parameter is an ordinary ``nn.Parameter`` with a mark. Scripts that tell flat parameters from others, to leave
them out of weight decay or to count elements, write ``isinstance(p, FlatParameter)``; the class here answers by the
mark. It is the mark that torch's class of this name looks for, so either class knows either one's parameters.

Worked example, ``FSDP(Linear(3, 3))`` on two ranks::

    use_orig_params=False    parameters() has one of 6 elements      isinstance says yes
    use_orig_params=True     parameters() has weight and bias        isinstance says no, twice

*In torch:* ``FlatParameter`` in ``_flat_param.py``. It documents a score of attributes that say how the parameter is
cut; here the layout knows that, and the parameter knows nothing.

Spec: ORIG-01, ORIG-02.
"""

import torch
from torch import nn


class _KnownByItsMark(type(nn.Parameter)):  # type: ignore[misc]
    """Makes ``isinstance`` ask for the mark."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_KnownByItsMark):
    """A unit's shard, as the optimizer owns it with ``use_orig_params=False``. To be asked for, not to be made by hand.

    Args:
        data: its values, 1-D.
        requires_grad: whether it is trained.
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """An ordinary parameter with the mark."""
        parameter = nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
        parameter._is_flat_param = True  # type: ignore[attr-defined]
        return parameter
