"""What a unit asks of the tensors it consists of: the contract, and the places where modules keep parameters.

A unit does not know how its parameters lie in memory. It calls a dozen methods of a *layout*: ``per_param.py`` has one
tensor for each parameter, ``flat.py`` has one long tensor for all.

Two variables, that is the idea of every layout here. The *shard* is what the optimizer owns: small, in full precision,
always there. The *unsharded leaf* is what autograd owns: large, in the compute dtype, with memory only while it is
needed. A gather goes from the first to the second, a reduction from the gradient of the second to that of the first.
Two ranks, a flat layout; the dot is padding::

    shard          [a a a b] on rank 0, [b b b .] on rank 1        always
                       | gather                ^ reduce
    unsharded      [a a a b b b b .]   --->  its gradient          from gather to free

`Slot` is the other half: a place in some module where a parameter is looked up by name. What a layout *shows* there
changes with time: the full tensor during compute, outside of it the shard, or something that stands in for it.

*In torch:* FSDP1 has one variable, ``FlatParameter``, whose ``.data`` is five tensors in turn. FSDP2 has both.

Spec: SHARD-02, ORIG-01 to ORIG-04, FWD-04, CTOR-12.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from minifsdp.engine import misuse
from minifsdp.engine.lanes import Lanes, Promise
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import message


@dataclass(frozen=True, slots=True)
class Slot:
    """A place where a module keeps a parameter: ``module.<name>``.

    Attributes:
        module: whose attribute it is.
        name: the attribute's name.
        path: full name inside the unit's module, for messages and state dicts.
        second_list: names of the weights that the module keeps in a list beside its attributes, as an LSTM does.
    """

    module: nn.Module
    name: str
    path: str
    second_list: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, name: str, path: str) -> Slot:
        """The slot of an attribute of ``module``."""
        names = tuple(module._flat_weights_names) if isinstance(module, nn.RNNBase) else ()
        return cls(module, name, path, names if name in names else ())

    def update_second_list(self, tensor: torch.Tensor) -> None:
        """For a module that keeps its weights twice: layouts write past ``__setattr__``, which would update both."""
        if self.second_list:
            self.module._flat_weights[self.second_list.index(self.name)] = tensor  # type: ignore[operator]


@dataclass(slots=True)
class Gradient:
    """Unsharded gradients of one unit on their way to the reduction.

    Attributes:
        parts: the tensors; a flat layout has one, of all parameters.
        numbers: the parameter of each, as an index into `Layout.parameters`, ascending; empty in a flat layout.
    """

    parts: list[torch.Tensor]
    numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """One parameter of a unit: what remains to be known of it when its values have gone into a layout.

    Attributes:
        shape: its original shape.
        slots: all places that show it, at least one. The first is where it was found first, others are ties to it.
    """

    shape: torch.Size
    slots: list[Slot]

    @property
    def path(self) -> str:
        """The parameter's name inside the unit."""
        return self.slots[0].path


def owned_parameters(
    modules: Iterable[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, OwnedParameter]:
    """The parameters that ``modules`` own themselves, in their order, each once, ties joined.

    What is part of a flat unit already, because the very module was wrapped before, is left to that unit.

    Args:
        modules: pairs of path and module; modules of inner units must not be among them.
        ignored: parameters to leave alone.

    Raises:
        ValueError: a parameter belongs to another unit already.
    """
    found: dict[nn.Parameter, OwnedParameter] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored or misuse.is_flattened(module, name):
                continue
            slot = Slot.of(module, name, full_name(prefix, name))
            misuse.check_free(parameter, module, name, slot.path)
            found.setdefault(parameter, OwnedParameter(parameter.shape, [])).slots.append(slot)
    return found


def replaced_parameter_error(slot: Slot, unit_name: str) -> RuntimeError:
    """The error for a slot that does not hold what was put there."""
    return RuntimeError(
        message("replaced-parameter", parameter=full_name(unit_name, slot.path), type=type(slot.module).__name__)
    )


def full_name(prefix: str, path: str) -> str:
    """A name inside the root, of what is called ``path`` inside the unit ``prefix``."""
    return f"{prefix}.{path}" if prefix else path


class Steps:
    """How many steps optimizers have taken on parameters of one tree of units."""

    count = 0


class Layout(ABC):
    """How the parameters of one unit lie in memory. Of autograd a layout touches its own leaves alone.

    Work is issued on *lanes*, streams beside the compute stream, as a *promise* to be waited for; see ``lanes.py``.

    Attributes:
        name: full name of the unit's module inside the root, for messages; set by the root.
        device: the compute device.
        dtype: dtype of the unsharded parameters.
        num_bytes: bytes of the unsharded parameters, padding included.
        offloads: whether shard and gradient live on the CPU between computations.
        parameters: what the unit is made of, in order.
        reduces_unused: whether trained parameters that got no gradient take part in a reduction, with zeros.
        steps: those of optimizers, counted for the whole tree.
    """

    name: str = ""
    device: torch.device
    dtype: torch.dtype
    num_bytes: int
    offloads: bool
    parameters: list[OwnedParameter]
    reduces_unused: bool = False
    steps = Steps()

    def full_name(self, path: str) -> str:
        """A parameter's name inside the root."""
        return full_name(self.name, path)

    # --- the unsharded tensor ---

    def on_gradient(self, notify: Callable[[], None] | None, make_room: Callable[..., None] | None = None) -> bool:
        """Whom to call when the unsharded gradient is complete; ``None`` for nothing.

        Args:
            notify: is called then.
            make_room: is called before it is put together from the gradients of the parameters, which are there.

        Returns:
            Whether the layout can tell. One with several leaves cannot: see ``triggers.py``.
        """
        return False

    @abstractmethod
    def settle(self) -> None:
        """Adapts to what was done to the module between construction and the first forward."""

    @property
    @abstractmethod
    def is_trained(self) -> bool:
        """Whether a backward will end in a gradient."""

    # --- memory ---

    @property
    @abstractmethod
    def gather_group(self) -> Group | None:
        """Who takes part in the next gather; ``None`` if no rank has to."""

    @abstractmethod
    def gather(self, lanes: Lanes) -> Promise | None:
        """Allocates the unsharded memory and starts to fill it. ``None`` if there is nothing to wait for."""

    @abstractmethod
    def free(self) -> ReleaseEvent | None:
        """Releases the unsharded memory, and says when it may be used again; ``None`` if there was none to release."""

    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the shard has been changed since it was gathered."""

    # --- what modules see ---

    @abstractmethod
    def notice_edits(self) -> None:
        """Takes over what the user has put in place of the unit's parameters since, or refuses it.

        Raises:
            RuntimeError: a parameter was removed, or replaced by what cannot stand in its place.
        """

    @abstractmethod
    def show_unsharded(self) -> None:
        """Puts full parameters on the modules, new views for a new forward."""

    @abstractmethod
    def show_again(self) -> None:
        """Puts back the views of the last forward that autograd recorded, for its backward."""

    def show_resting(self, *, is_kept: bool) -> None:  # noqa: B027
        """Puts on the modules what they have between a forward and a backward if the memory is kept for that.

        Args:
            is_kept: that is the unit's strategy; otherwise the unit is the root, held because its backward is near.

        A layout may leave there what is there.
        """

    @abstractmethod
    def show_sharded(self) -> None:
        """Puts on the modules what they have while the parameters are not gathered."""

    # --- gradients ---

    @property
    @abstractmethod
    def has_gradient(self) -> bool:
        """Whether autograd has left a gradient that was not taken."""

    @abstractmethod
    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """Takes away what autograd has left; if so wished, what `keep_unreduced` has collected is added to it.

        Returns:
            ``None`` if there is nothing.
        """

    def part_over(self, mesh: Mesh, gradient: Gradient) -> Gradient:
        """The part of ``gradient`` whose parameters are cut over ``mesh``; all of it where a unit has one mesh."""
        return gradient

    @abstractmethod
    def keep_unreduced(self, gradient: Gradient) -> None:
        """Adds unsharded gradients to those that wait for their reduction."""

    @abstractmethod
    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        """``gradient`` as a reduction needs it: 1-D, of ``dtype``, the local shards of all ranks one after the other.

        Args:
            gradient: as `take_gradient` returns it.
            dtype: of the result.
            is_written: the caller, or other code while the result is sent, may write to its memory. Then the result
                must share no memory with another tensor.
        """

    @abstractmethod
    def copy_to_host(self, piece: torch.Tensor) -> torch.Tensor:
        """Where shards live on the CPU: a copy of a reduced piece there, made by the current stream; nothing waits.

        What cannot be copied without waiting is returned as it is, and `accept_gradient` copies it.
        """

    @property
    def reads_gradient(self) -> bool:
        """Whether a reduced gradient is read when it is accepted: to be added to another, or by hooks of the user."""
        return self.has_gradient_hooks or any(p.grad is not None for p in self.local_parameters())

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether the user's post-accumulate hooks run when a reduced gradient is accepted."""
        return any(p._post_accumulate_grad_hooks for p in self.local_parameters())

    @abstractmethod
    def accept_gradient(self, gradient: Gradient, piece: torch.Tensor) -> None:
        """Adds this rank's piece of the reduced ``gradient`` to what the optimizer will see."""

    @property
    @abstractmethod
    def has_unreduced(self) -> bool:
        """Whether something that `keep_unreduced` was given still waits for its reduction."""

    # --- the user ---

    @abstractmethod
    def local_parameters(self) -> list[nn.Parameter]:
        """What the optimizer owns of this unit."""
