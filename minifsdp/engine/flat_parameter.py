"""The flat parameter: a unit's shard as one parameter (``use_orig_params=False``).

The shard of a unit is one 1-D tensor. The simplest way to pass it to an optimizer is as one parameter, the *flat
parameter*. It is registered on the unit's module under the name ``_flat_param``. ``named_parameters()`` then does not
yield the original parameters. While the unit is sharded, modules have a
`PlaceholderParameter` in place of each of them.

Worked example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    before     weight: 6 elements, bias: 3 elements
    after      _flat_param: 5 elements on each rank

The flat parameter is either trained or frozen, because it is one tensor for autograd. A mixture raises an error before
anything is changed. ``ownership.py`` handles the gradients: the flat parameter is the case of one part.

*In torch:* ``FlatParameter``, which is also the unsharded tensor.

Spec: ORIG-01, ORIG-12, ORIG-14, SUMMON-02, SUMMON-06.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from minifsdp.engine import validation
from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.messages import message
from minifsdp.engine.ownership import Ownership, frozen_among_trained
from minifsdp.engine.placeholder import PlaceholderParameter

FLAT_NAME = "_flat_param"


class FlatOwnership(Ownership):
    """The shard as one parameter.

    Args:
        home: the unit's module, where the flat parameter is registered.
        parameters: the original parameters. This object keeps no reference to them.
        shard: 1-D, this rank's shard, in the stored dtype and on the storage device.
        keep_reduce_dtype: whether a reduced gradient may have another dtype than the shard.

    Attributes:
        shard: the flat parameter itself.

    Raises:
        ValueError: some parameters are frozen and some are trained. The message has the names of both.
    """

    hides_originals = True

    def __init__(
        self,
        home: nn.Module,
        parameters: Mapping[nn.Parameter, ParamInfo],
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
        # `isinstance` and other frameworks recognize torch's FlatParameter by these attributes.
        self.shard._is_flat_param = True  # type: ignore[attr-defined]
        self.shard._fsdp_flattened = True  # type: ignore[attr-defined]
        self.placeholders = [
            PlaceholderParameter(p.shape, p.dtype, p.device, owned.path) for p, owned in parameters.items()
        ]
        for original, owned in parameters.items():
            validation.note_taken(original, owned.path, is_replaced=True)
            for slot in owned.attributes:
                delattr(slot.module, slot.name)
        validation.note_place(home, FLAT_NAME, None)
        self.hide_full()

    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters for ``views``. Removes the flat parameter from the module until `hide_full`."""
        del self.home._parameters[FLAT_NAME]
        return [nn.Parameter(view, requires_grad=self.requires_grad) for view in views]

    def hide_full(self) -> None:
        """Registers the flat parameter again."""
        self.home.register_parameter(FLAT_NAME, self.shard)
