"""The flat parameter: a unit's shard as one parameter.

The stored shard is one 1-D tensor. The plain way to give it to an optimizer is as one parameter, the *flat parameter*,
registered on the unit's module under the name ``_flat_param``. The original parameters are then gone from
``named_parameters()``; in their places modules show an `AbsentParameter` until the unit is gathered.

Worked example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    before     weight: 6 elements, bias: 3 elements
    after      _flat_param: 5 elements on each rank

It is trained or frozen as a whole, for autograd knows one tensor; a mixture is refused before anything is changed. How
gradients come to it is told in ``ownership.py``: it is the one part of whatever comes.

*In torch:* ``FlatParameter``, which is the gathered tensor as well.

Spec: ORIG-01, ORIG-12, ORIG-14, SUMMON-02, SUMMON-06.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from minifsdp.engine import misuse
from minifsdp.engine.absent import AbsentParameter
from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message
from minifsdp.engine.ownership import Ownership, frozen_among_trained

FLAT_NAME = "_flat_param"


class FlatOwnership(Ownership):
    """The shard as one parameter.

    Args:
        home: the unit's module; the flat parameter is registered there.
        parameters: what it is made of; afterwards nothing here holds on to the originals.
        shard: 1-D, this rank's shard, in the dtype and on the device where it is stored.
        keep_reduce_dtype: whether a reduced gradient may stay in another dtype than the shard's.

    Attributes:
        shard: the flat parameter itself.

    Raises:
        ValueError: some of the parameters are frozen and some are not, with the names on both sides.
    """

    hides_originals = True

    def __init__(
        self,
        home: nn.Module,
        parameters: Mapping[nn.Parameter, OwnedParameter],
        shard: torch.Tensor,
        keep_reduce_dtype: bool,
    ) -> None:
        frozen = frozen_among_trained(parameters)
        if frozen:
            trained = [owned.path for original, owned in parameters.items() if original.requires_grad]
            raise ValueError(message("mixed-requires-grad", type=type(home).__name__, trained=trained, frozen=frozen))
        self.home, self.keep_reduce_dtype = home, keep_reduce_dtype
        self.shard: nn.Parameter = nn.Parameter(shard, requires_grad=next(iter(parameters)).requires_grad)
        self.parameters = [self.shard]
        # What torch's FlatParameter is known by: to isinstance, and to frameworks that look into an optimizer.
        self.shard._is_flat_param = True  # type: ignore[attr-defined]
        self.shard._fsdp_flattened = True  # type: ignore[attr-defined]
        self.stand_ins = [AbsentParameter(p.shape, p.dtype, p.device, owned.path) for p, owned in parameters.items()]
        for original, owned in parameters.items():
            misuse.note_taken(original, owned.path, is_replaced=True)
            for slot in owned.slots:
                delattr(slot.module, slot.name)
        misuse.note_place(home, FLAT_NAME, None)
        self.hide_full()

    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters for ``views``; the flat parameter is not listed while modules show them."""
        del self.home._parameters[FLAT_NAME]
        return [nn.Parameter(view, requires_grad=self.requires_grad) for view in views]

    def hide_full(self) -> None:
        """The flat parameter is listed again."""
        self.home.register_parameter(FLAT_NAME, self.shard)
