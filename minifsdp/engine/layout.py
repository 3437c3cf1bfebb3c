"""The `Layout` interface: how a unit's parameters are stored, all-gathered, freed and reduced.

A unit does not depend on how its parameters are stored. It calls the methods of a *layout*. The layout in
``per_param.py`` has one tensor for each parameter, and the layout in ``flat.py`` has one long tensor for all.

Every layout uses two variables. The optimizer updates the *shard*, which is small, in full precision, and always
allocated. Autograd uses the *unsharded leaf*, which is large, in the compute dtype, and has memory only while it is
needed. An all-gather fills the leaf from the shards. A reduction computes the gradient of the shard from the gradient
of the leaf. Example with two ranks and a flat layout; the dot is padding::

    shard          [a a a b] on rank 0, [b b b .] on rank 1        always
                       | all-gather            ^ reduce
    unsharded      [a a a b b b b .]   --->  its gradient          from all-gather to reshard

A `ParamInfo` describes a module attribute that refers to a parameter. The layout changes the attribute's value over
time. While the unit is unsharded, the value is nearly always the unsharded parameter. Otherwise it is the shard or a
placeholder.

*In torch:* FSDP1 has one variable, ``FlatParameter``, whose ``.data`` is five tensors in turn. FSDP2 has two variables.

Spec: SHARD-02, ORIG-01 to ORIG-04, FWD-04, CTOR-12, PROG-100.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from minifsdp.engine.comm_streams import CommStreams, Handle
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision


@dataclass(frozen=True, slots=True, eq=False)
class ParamInfo:
    """A parameter as the user has defined it, ``module.<name>``. It does not change when the parameter is sharded.

    Attributes:
        module: the module that has the parameter as an attribute.
        name: the attribute's name.
        path: full name inside the unit's module, for messages and state dicts.
        shape: the unsharded shape.
        second_places: other places where modules store the parameter, for example the list of an LSTM. Each place is
            a dict, and the keys that lead from there to the parameter.
        ties: the other module attributes that refer to the same parameter; added later.
    """

    module: nn.Module
    name: str
    path: str
    shape: torch.Size
    second_places: list[tuple[Any, ...]] = field(default_factory=list)
    ties: list[ParamInfo] = field(default_factory=list)

    @property
    def places(self) -> list[ParamInfo]:
        """Every module attribute that refers to the parameter, this one first."""
        return [self, *self.ties]

    def update_second_places(self, tensor: torch.Tensor) -> None:
        """Stores ``tensor`` in all second places."""
        for place, *keys, last in self.second_places:
            for key in keys:
                place = place[key]
            place[last] = tensor


@dataclass(slots=True)
class Gradient:
    """Unsharded gradients of one unit, before their reduction.

    Attributes:
        parts: the tensors; a flat layout has one, for all parameters.
        indices: the parameter of each tensor, as an index into `Layout.param_infos`, ascending; empty in a flat layout.
    """

    parts: list[torch.Tensor]
    indices: list[int] = field(default_factory=list)

    def only(self, indices: Container[int]) -> Gradient:
        """The gradients of these parameters."""
        chosen = [
            position for position, index in enumerate(self.indices) if index in indices
        ]
        return Gradient(
            [self.parts[position] for position in chosen],
            [self.indices[position] for position in chosen],
        )


def owned_parameters(
    modules: Iterable[tuple[str, nn.Module]],
    ignored: set[nn.Parameter],
    is_apart: Callable[[nn.Module, str], bool] = lambda module, name: False,
) -> dict[nn.Parameter, ParamInfo]:
    """The parameters that ``modules`` own directly, in order. Tied parameters appear once.

    Args:
        modules: pairs of path and module; must not contain modules of inner units.
        ignored: parameters to skip.
        is_apart: whether to skip an attribute of a module.
    """
    found: dict[nn.Parameter, ParamInfo] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored or is_apart(module, name):
                continue
            info = ParamInfo(module, name, full_name(prefix, name), parameter.shape)
            first = found.setdefault(parameter, info)
            if first is not info:
                first.ties.append(info)
    return found


def share_hooks(original: torch.Tensor, other: torch.Tensor) -> None:
    """Uses the hooks of ``original`` for ``other`` too. A hook that the user removes later is removed from both."""
    other._backward_hooks = original._backward_hooks
    other._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks


@dataclass(slots=True)
class ParameterHook:
    """A hook of a registered parameter that ignores the calls of autograd for the nodes of a case.

    ``cases/requested_parameters.py`` adds these nodes. The calls have no gradient. A post-accumulate-grad hook is
    called with the parameter instead.

    Attributes:
        function: the user's hook.
        is_skipped: whether to ignore the next call with the parameter.
    """

    function: Callable[[Any], Any]
    is_skipped: bool = True

    def __call__(self, argument: torch.Tensor | None) -> Any:
        """Calls the user's hook with a gradient or with the parameter."""
        is_ignored = argument is None or (
            self.is_skipped and isinstance(argument, nn.Parameter)
        )
        self.is_skipped = False
        return None if is_ignored else self.function(argument)


def users_hooks(hooks: Mapping[int, Any]) -> list[tuple[int, Callable[[Any], Any]]]:
    """The numbers and functions of hooks of a registered parameter."""
    return [
        (key, hook.function if isinstance(hook, ParameterHook) else hook)
        for key, hook in hooks.items()
    ]


def full_name(prefix: str, path: str) -> str:
    """Converts ``path``, a name inside the unit ``prefix``, to a name inside the root."""
    return f"{prefix}.{path}" if prefix else path


def replaced_error(layout: Layout, info: ParamInfo) -> RuntimeError:
    """The error for a module attribute whose tensor is not the tensor that the layout registered."""
    path = full_name(layout.name, info.path)
    kind = type(info.module).__name__
    if layout.shards_are_dtensors:
        return RuntimeError(message("replaced-dtensor", parameter=path, type=kind))
    return RuntimeError(message("replaced-parameter", parameter=path, type=kind))


class Steps:
    """The number of optimizer steps on the parameters of one root's units."""

    count = 0


class Layout(Protocol):
    """How the parameters of one unit are stored.

    Both layouts inherit from this class. Methods without a body differ between the layouts.
    `all_gather` issues work on a communication stream and returns a handle to wait for; see ``comm_streams.py``.

    Attributes:
        name: full name of the unit's module inside the root, for messages; set by the root.
        device: the compute device.
        precision: the dtypes for compute and reduction.
        dtype: dtype of the gradients before the reduction: of the unsharded parameters, or the user's ``grad_dtype``;
            with several, one that represents those of all trained parameters.
        num_bytes: size of the unsharded parameters, including padding.
        offloads: whether shard and gradient are on the CPU between computations.
        group: the ranks of the next all-gather; ``None`` if it needs no other rank.
        param_infos: the unit's original parameters, in order.
        local_parameters: the parameters of this unit that the optimizer updates.
        leaves: the leaves that autograd computes gradients of; one for each of `local_parameters`, or for all of them.
        reduces_unused: whether the reduction includes zeros for trainable parameters without a gradient.
        is_borrowed: whether the unsharded parameters have no memory of their own.
        is_summoned: whether the modules have the parameters from ``summon_full_params``.
        shards_are_dtensors: whether the optimizer's parameters are DTensors, which compute over all ranks.
        steps: the number of optimizer steps, shared by all units of the root. So the ranks agree about it, even if an
            optimizer of one rank holds no parameters of this layout.
        stepped_at: the number of the last of these steps in which parameters of this layout had gradients.
    """

    name: str = ""
    device: torch.device
    precision: Precision
    dtype: torch.dtype
    num_bytes: int
    offloads: bool
    group: Group | None
    param_infos: list[ParamInfo]
    local_parameters: list[nn.Parameter]
    leaves: list[torch.Tensor]
    reduces_unused: bool = False
    steps: Steps
    stepped_at: int = 0
    is_borrowed: bool
    is_summoned: bool = False
    shards_are_dtensors: bool = False

    # --- the unsharded tensor ---

    def on_gradient(
        self,
        notify: Callable[[], None] | None,
        before_concat: Callable[..., None] | None = None,
    ) -> bool:
        """Registers callbacks for the unsharded gradient; ``None`` unregisters them.

        Args:
            notify: called when the unsharded gradient is complete.
            before_concat: called directly before the parameters' gradients are concatenated to the unsharded gradient.

        Returns:
            Whether the layout can detect this. A layout with several leaves cannot: see ``backward_hooks.py``.
        """
        return False

    def all_gather(self, comm_streams: CommStreams) -> Handle | None:
        """Allocates the unsharded memory and issues the all-gather. Returns ``None`` if no wait is needed."""

    def free(self) -> ReleaseEvent | None:
        """Frees the unsharded memory. Returns the event after which it can be reused; ``None`` if nothing was freed."""

    def is_stale(self) -> bool:
        """Whether the shard has changed since it was all-gathered."""

    # --- the attributes of modules ---

    def use_unsharded_params(self, *, is_backward: bool = False) -> None:
        """Registers the unsharded parameters on the modules.

        Args:
            is_backward: register the views of the last recorded forward again, instead of new views.
        """

    def use_kept_params(self, *, is_kept: bool) -> None:
        """Registers the tensors that modules have between forward and backward if memory is kept.

        Args:
            is_kept: whether the memory is kept for a backward, and not for the next iteration.
        """

    def use_sharded_params(self) -> None:
        """Registers the tensors that modules have while the parameters are sharded."""

    # --- gradients ---

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """Removes and returns the accumulated gradient, optionally adding the gradients saved by `keep_unreduced`.

        Returns:
            ``None`` if there is no gradient.
        """

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Accumulates unsharded gradients for a later reduction."""

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients saved by `keep_unreduced` are still waiting for their reduction."""

    def pack(
        self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False
    ) -> torch.Tensor:
        """Packs ``gradient`` for its reduction: 1-D, of ``dtype``, the shards of all ranks one after the other.

        Args:
            gradient: the result of `take_gradient`.
            dtype: the dtype of the result.
            is_written: whether the caller, or other code during the communication, may write to the result. If so, the
                result must share no memory with another tensor.
        """

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        """With CPU offload, issues an asynchronous copy of a reduced shard to the CPU on the current stream.

        If an asynchronous copy is not possible, returns ``local_shard`` unchanged, and `accept_gradient` copies it.
        """

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        """Adds this rank's shard of the reduced ``gradient`` to the gradient that the optimizer uses."""
