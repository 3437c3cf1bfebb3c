"""The parameters that a flat unit registers: one flat parameter, or the original parameters.

The memory of a flat unit is the same in both cases: a local shard and an unsharded flat tensor. The difference is the
tensor that is *registered* as a parameter. It determines the result of ``parameters()``, the tensors that an optimizer
updates, and where ``.grad`` is stored. Example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    use_orig_params=False    _flat_param: 5 elements on each rank, the last one on rank 1 is padding
    use_orig_params=True     rank 0    weight: 5 elements     bias: 0 elements
                             rank 1    weight: 1 element      bias: 3 elements, and padding after them

* A *flat parameter* is the shard itself. It is either trained or frozen, because it is one tensor for autograd. A mix
  of trained and frozen parameters raises an error before any change. Modules have a `PlaceholderParameter` in place of
  each original parameter.
* *Original parameters* stay registered under their names, each as a 1-D view of its elements in the shard. So an
  optimizer can treat biases and weights differently, and its steps write to the shard without a copy. Frozen and
  trained parameters may share a unit: all are all-gathered and reduced, and the gradients of frozen ones are discarded.

*In torch:* ``FlatParameter``, which is also the unsharded tensor. ``_flat_param.py`` checks ``use_orig_params`` in more
than thirty places, among them ``_use_sharded_views`` and ``_writeback_orig_params``.

Spec: ORIG-01 to ORIG-05, ORIG-08 to ORIG-10, ORIG-12 to ORIG-14, ORIG-17, SUMMON-02, SUMMON-06, STREAM-05.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import ParamInfo, share_hooks
from minifsdp.engine.messages import message, warn
from minifsdp.engine.placeholder import PlaceholderParameter
from minifsdp.engine.shards import local_tensor

FLAT_NAME = "_flat_param"
# The attributes of each module that are part of a flat unit.
_flattened = weakref.WeakKeyDictionary[nn.Module, set[str]]()
_REQUIRES_GRAD = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
_ADDRESS = methodcaller("data_ptr")


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether attribute ``name`` of ``module`` is part of a flat unit. Later units do not take it (CTOR-17).

    This depends on the attribute and not on the tensor: the same tensor in another module is a tied parameter.
    """
    return name in _flattened.get(module, ())


class RegisteredParams(ABC):
    """The registered parameters of one flat unit. Each one holds its part of the shard.

    Args:
        originals: the original parameters. This object keeps no reference to them.
        shard: 1-D, this rank's shard in the stored dtype; the flat parameter, or the memory of the original parameters.
        parameters: the parameters that the optimizer updates.
        sharded_params: for each original parameter, the tensor that modules have while the unit is sharded.

    Attributes:
        shard, parameters, sharded_params: as given.
        user_attributes: the attributes that the user has set on original parameters, with the parameters' indices.
    """

    def __init__(
        self,
        originals: Iterable[nn.Parameter],
        shard: torch.Tensor,
        parameters: list[nn.Parameter],
        sharded_params: Sequence[torch.Tensor],
    ) -> None:
        self.shard = shard
        self.parameters = parameters
        self.sharded_params = sharded_params
        self.user_attributes = _user_attributes(originals)

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trained. The user may change this at any time."""
        return any(map(_REQUIRES_GRAD, self.parameters))

    @abstractmethod
    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters with the values ``views``, for the modules inside ``summon_full_params``."""

    @abstractmethod
    def use_sharded_params(self) -> None:
        """Registers the sharded parameters, at construction and after `use_full_params`."""

    def parts(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a shard, as views. A single part is ``shard`` itself."""
        return [shard]

    def unsharded_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of an unsharded flat tensor with padding."""
        return [flat]

    # --- values ---

    def write_back(self) -> bool:
        """Updates the shard with values that the user has put into other memory. Returns whether there were any."""
        return False

    def refresh_from_module(self) -> None:  # noqa: B027
        """Adapts the shard if the dtype or device of its parameters has changed, for example after ``model.half()``."""

    def overwrite(self, shard: torch.Tensor) -> None:
        """Writes new values into the shard. `stamp` differs afterwards."""
        with torch.no_grad():
            self.shard.copy_(shard)
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory was replaced, in between."""
        return list(map(_VERSION, self.parameters)), list(
            map(_ADDRESS, self.parameters)
        )


class RegisteredFlatParam(RegisteredParams):
    """The shard as one parameter of the unit's module (``use_orig_params=False``).

    Args:
        module: the unit's module.
        parameters: the original parameters. This object keeps no reference to them.
        shard: 1-D, this rank's shard, in the stored dtype and on the storage device.

    Raises:
        ValueError: if some parameters are frozen and some are trained. The message has the names of both.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[nn.Parameter, ParamInfo],
        shard: torch.Tensor,
    ) -> None:
        frozen = _frozen_among_trained(parameters)
        if frozen:
            trained = [
                info.path
                for original, info in parameters.items()
                if original.requires_grad
            ]
            raise ValueError(
                message(
                    "mixed-requires-grad",
                    type=type(module).__name__,
                    trained=trained,
                    frozen=frozen,
                )
            )
        flat_param = nn.Parameter(
            shard, requires_grad=next(iter(parameters)).requires_grad
        )
        # `isinstance` and other frameworks recognize torch's FlatParameter by these attributes.
        flat_param._is_flat_param = flat_param._fsdp_flattened = True  # type: ignore[attr-defined]
        placeholders = [
            PlaceholderParameter(p, info.path, flat_param)
            for p, info in parameters.items()
        ]
        never = [
            info.path
            for original, info in parameters.items()
            if original._post_accumulate_grad_hooks
        ]
        if never:
            warn(message("hooks-on-replaced", parameters=never))
        super().__init__(parameters, flat_param, [flat_param], placeholders)
        self._module = module
        for index, attributes in self.user_attributes:
            vars(placeholders[index]).update(attributes)
        for (original, info), placeholder in zip(
            parameters.items(), placeholders, strict=True
        ):
            placeholder._backward_hooks = original._backward_hooks
            for attribute in info.places:
                delattr(attribute.module, attribute.name)
        _flattened.setdefault(module, set()).add(FLAT_NAME)
        self.use_sharded_params()

    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Ordinary parameters for ``views``. Unregisters the flat parameter until `use_sharded_params`."""
        del self._module._parameters[FLAT_NAME]
        return [nn.Parameter(view, requires_grad=self.requires_grad) for view in views]

    def use_sharded_params(self) -> None:
        """Registers the flat parameter."""
        self._module.register_parameter(FLAT_NAME, self.parameters[0])


class RegisteredOrigParams(RegisteredParams):
    """The original parameters as views of the shard (``use_orig_params=True``).

    Users can give a parameter other memory: ``p.data = ...``, or ``model.to_empty()``. Then the address of the
    parameter differs. `write_back` copies its values into the shard before the next use of the shard.

    Args:
        parameters: the original parameters; they stay registered. A ``DTensor`` cannot be a 1-D view of the shard, so
            an ordinary parameter replaces it.
        shard: 1-D, this rank's shard.
        sharding: how the flat tensor is sharded.
        index: the index of this rank's shard.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, ParamInfo],
        shard: torch.Tensor,
        sharding: FlatSharding,
        index: int,
    ) -> None:
        registered = [
            _ordinary(p) if isinstance(p, DTensor) or p.is_inference() else p
            for p in parameters
        ]
        super().__init__(parameters, shard, registered, registered)
        self._sharding = sharding
        self._shapes = [parameter.shape for parameter in registered]
        sizes = [part.stop - part.start for part in sharding.param_ranges(index)]
        self._split_sizes = [*sizes, sharding.shard_numel - sum(sizes)]
        self._shard_views = self.parts(shard)
        self._paths = [info.path for info in parameters.values()]
        for info in parameters.values():
            for attribute in info.places:
                _flattened.setdefault(attribute.module, set()).add(attribute.name)
        frozen = _frozen_among_trained(parameters)
        if frozen:
            warn(message("frozen-among-trained", frozen=frozen))
        self._sharded_gradients = [parameter.grad for parameter in registered]
        self.use_sharded_params()

    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """The original parameters with ``views`` as their data; new ones for a ``DTensor``. Removes their gradients."""
        self._sharded_gradients = [parameter.grad for parameter in self.parameters]
        full_params = []
        for original, view in zip(self.parameters, views, strict=True):
            original.grad = None
            if isinstance(view, DTensor):
                full_params.append(
                    nn.Parameter(view, requires_grad=original.requires_grad)
                )
            else:
                original.data = view
                full_params.append(original)
        return full_params

    def use_sharded_params(self) -> None:
        """Makes the original parameters views of the shard. Restores the gradients that `use_full_params` removed."""
        for original, view in zip(self.parameters, self._shard_views, strict=True):
            original.data = view
        gradients = self._sharded_gradients
        self._sharded_gradients = []
        assign_gradients(self.parameters, gradients)

    def parts(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a shard: 1-D, or in the original shape if the unit is not sharded."""
        if self._sharding.num_shards == 1:
            return self.unsharded_parts(shard)
        return list(shard.split_with_sizes(self._split_sizes)[: len(self._shapes)])

    def unsharded_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter in an unsharded flat tensor, in its original shape."""
        return self._sharding.views(flat, self._shapes)

    def write_back(self) -> bool:
        """Copies parameters that have other memory into the shard, and makes them views again. Returns whether any had.

        Raises:
            RuntimeError: if the new tensor has another number of elements.
        """
        has_copied = False
        for path, original, view in zip(
            self._paths, self.parameters, self._shard_views, strict=True
        ):
            # Both addresses are 0 for empty tensors. A transposed view has the same address.
            if (
                original.data_ptr() == view.data_ptr()
                and original.stride() == view.stride()
            ):
                continue
            found = original.numel()
            expected = view.numel()
            if found != expected:
                raise RuntimeError(
                    message(
                        "wrong-size", parameter=path, found=found, expected=expected
                    )
                )
            view.copy_(original.data.contiguous().reshape(view.shape))
            original.data = view
            # The parameter has its old address again. Only the new version marks an unsharded copy as stale.
            torch.autograd.graph.increment_version(original)
            has_copied = True
        return has_copied

    def refresh_from_module(self) -> None:
        """Creates a new shard if dtype or device of the parameters have changed, and copies their values into it."""
        first = self.parameters[0]
        if first.dtype is not self.shard.dtype or first.device != self.shard.device:
            self.shard = torch.zeros_like(
                self.shard, device=first.device, dtype=first.dtype
            )
            self._shard_views = self.parts(self.shard)
            self.write_back()


def assign_gradients(
    parameters: Sequence[nn.Parameter], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Sets the ``.grad`` of each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None
        if gradient is not None:
            assign_gradient(parameter, gradient)


def assign_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """``parameter.grad = gradient``, even if shape, dtype or device differ.

    PyTorch rejects such an assignment. So ``parameter.data`` is set to the gradient during the assignment.
    """
    if (
        gradient.shape == parameter.shape
        and gradient.dtype is parameter.dtype
        and gradient.device == parameter.device
    ):
        parameter.grad = gradient
        return
    data = parameter.data
    parameter.data = gradient
    parameter.grad = gradient
    parameter.data = data


def check_uniform_dtype(
    module: nn.Module, parameters: Mapping[nn.Parameter, ParamInfo]
) -> None:
    """Checks that the parameters can be one flat tensor: they have one dtype, and autograd supports it.

    Raises:
        ValueError: if the parameters have several dtypes or an integer dtype.
    """
    kind = type(module).__name__
    dtypes = sorted({str(original.dtype) for original in parameters})
    if len(dtypes) > 1:
        raise ValueError(message("mixed-dtypes", type=kind, dtypes=", ".join(dtypes)))
    first = next(iter(parameters))
    if not (first.is_floating_point() or first.is_complex()):
        paths = ", ".join(info.path for info in parameters.values())
        raise ValueError(
            message("integer-parameters", type=kind, dtype=dtypes[0], parameters=paths)
        )


def _ordinary(original: nn.Parameter) -> nn.Parameter:
    """A parameter that replaces a ``DTensor`` or an inference tensor. It becomes a view of the shard later."""
    local = local_tensor(original.detach())
    ordinary = nn.Parameter(
        local.new_empty(()).expand(local.shape), requires_grad=original.requires_grad
    )
    share_hooks(original, ordinary)
    return ordinary


def _user_attributes(
    parameters: Iterable[nn.Parameter],
) -> list[tuple[int, dict[str, object]]]:
    """The attributes that the user has set on parameters. Modules may read them in forward."""
    # Skip attributes of a tensor subclass.
    own = [
        {name: value for name, value in vars(p).items() if name not in vars(p.detach())}
        for p in parameters
    ]
    return [(index, attributes) for index, attributes in enumerate(own) if attributes]


def _frozen_among_trained(parameters: Mapping[nn.Parameter, ParamInfo]) -> list[str]:
    """The names of the frozen parameters if other parameters are trained; empty otherwise."""
    frozen = [
        info.path for original, info in parameters.items() if not original.requires_grad
    ]
    return frozen if len(frozen) < len(parameters) else []
