"""The parameters that a flat unit registers, one flat parameter or the original parameters, and their gradients.

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

Both kinds of gradients are stored in ``.grad``, but their sizes differ:

* The *reduced* gradient has the size of the shard. It is this rank's shard of the mean over all ranks.
* The *unreduced* gradient comes from a backward inside ``no_sync()``. It has the size of the unsharded unit. It is the
  sum over the micro-batches of this rank only.

Each registered parameter gets its part of a gradient. With a flat parameter, there is one part.

Worked example: a flat parameter of 4 elements on two ranks, and two micro-batches, the first inside ``no_sync``. Their
gradients are ``[1 1 1 1]`` and ``[2 2 2 2]`` on rank 0, ``[3 3 3 3]`` and ``[4 4 4 4]`` on rank 1::

    after the first backward    .grad is [1 1 1 1] on rank 0, [3 3 3 3] on rank 1        unreduced
    during the second           [3 3 3 3] and [7 7 7 7] are reduced: sum 10, mean 5
    after it                    .grad is [5 5] on both                                   reduced

The unreduced gradient is stored in ``.grad`` because ``zero_grad()`` must clear it. Otherwise it would be added to the
gradient of the next step. ``minifsdp/checks/optimizer_checks.py`` raises an error if an optimizer step finds an
unreduced gradient.

*In torch:* ``FlatParameter``, which is also the unsharded tensor. ``_flat_param.py`` checks ``use_orig_params`` in more
than thirty places, among them ``_use_sharded_views`` and ``_writeback_orig_params``. Gradients pass through
``_saved_grad_shard``, ``_cpu_grad`` and ``prepare_gradient_for_*``.

Spec: ORIG-01 to ORIG-05, ORIG-08 to ORIG-10, ORIG-12 to ORIG-14, ORIG-17, SHARD-06, NOSYNC-02, NOSYNC-05, NOSYNC-10,
FWD-07, FWD-08, MP-11, MP-12, SUMMON-02, SUMMON-06, STREAM-05, STREAM-08.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import ParamInfo, share_hooks, users_hooks
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
    """The registered parameters of one flat unit, and their gradients. Each one holds its part of the shard.

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
        # The reduced gradients, while unreduced gradients replace them in `.grad`; otherwise `None`.
        self._reduced: list[torch.Tensor | None] | None = None
        self._unreduced: torch.Tensor | None = None
        self._version = 0
        # Which parts of the unreduced gradient were not zero, for parameters with a reduced gradient.
        self._had_values: list[bool | torch.Tensor] = []

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

    # --- reduced gradients ---

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds a shard of a reduced gradient to ``.grad`` of the trained parameters."""
        for parameter, part in zip(self.parameters, self.parts(shard), strict=True):
            # An original parameter without elements on this rank gets no gradient.
            if not parameter.requires_grad or (part is not shard and 0 in part.shape):
                continue
            if parameter.grad is None:
                assign_gradient(parameter, part)
            else:
                parameter.grad.add_(part)
            # Autograd did not accumulate this gradient, so it does not call the post-accumulate hooks.
            hooks = parameter._post_accumulate_grad_hooks
            for _, hook in users_hooks(hooks) if hooks else ():
                hook(parameter)

    # --- unreduced gradients ---

    @property
    def has_unreduced(self) -> bool:
        """Whether there is a ``.grad`` that was not reduced."""
        return self._reduced is not None and any(
            parameter.grad is not None for parameter in self.parameters
        )

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds ``gradient`` to the unreduced gradient. Stores an existing reduced gradient elsewhere meanwhile."""
        before = self.take_unreduced()
        if before is not None:
            gradient = (
                before.add_(gradient)
                if before.dtype is gradient.dtype
                else before + gradient
            )
        self._reduced = [parameter.grad for parameter in self.parameters]
        parts = self.unsharded_parts(gradient)
        # With several parts, this attribute holds the gradient. With a flat parameter, only `.grad` holds it.
        self._unreduced = None if parts[0] is gradient else gradient
        self._version = gradient._version
        self._had_values = [
            old is not None and part.any()
            for old, part in zip(self._reduced, parts, strict=True)
        ]
        pairs = zip(self.parameters, parts, strict=True)
        assign_gradients(
            self.parameters,
            [part if parameter.requires_grad else None for parameter, part in pairs],
        )

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes and returns the unreduced gradient, and restores the reduced one in ``.grad``, if any."""
        if self._reduced is None:
            return None
        unreduced = (
            self.parameters[0].grad if self._unreduced is None else self._unreduced
        )
        reduced = self._reduced
        self._reduced = None
        self._unreduced = None
        if unreduced is None:
            return None
        any_left = False
        is_edited = unreduced._version != self._version
        parts = self.unsharded_parts(unreduced)
        for parameter, before, part, had_values in zip(
            self.parameters, reduced, parts, self._had_values, strict=True
        ):
            if parameter.grad is None:
                # zero_grad() was called for all parameters or for this one. It also clears the reduced gradient.
                part.zero_()
                continue
            any_left = True
            if (
                parameter.grad.data_ptr() != part.data_ptr()
                and parameter.grad.shape == part.shape
            ):
                # The user has assigned another gradient. PyTorch allows this size only if the unit is not sharded.
                part.copy_(parameter.grad)
            parameter.grad = None
            if before is not None:
                if is_edited and not (part if had_values else unreduced).any():
                    # zero_grad(set_to_none=False) has cleared only the unreduced gradient.
                    before.zero_()
                assign_gradient(parameter, before)
        return unreduced if any_left else None


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
