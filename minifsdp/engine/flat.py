"""The flat layout: all parameters of a unit in one flat parameter, and views into it.

The parameters of a unit are concatenated into one 1-D tensor, which is split into equal shards, one for each rank. See
``flat_tensor.py`` for an example. Parameters are neither aligned nor reordered. The last shard is padded.

Advantage: an all-gather is *one* collective that writes directly into the memory that the forward reads, without a copy
before or after it. Disadvantage: users cannot print, save or clip a shard as a weight.

1. Each forward creates its views at the moment of use. Autograd runs the newest nodes first. Views created earlier, for
   example when the all-gather is issued, would be older than the nodes of the previous unit. Then the gradient of this
   unit would be complete only after the backward of the previous unit, and both would need memory.
2. One ``split`` creates all of them, because its backward is one concatenation into one flat gradient. The
   concatenation uses zeros for parameters without a gradient. The split includes the padding, which gets zeros as well.

The unsharded tensor lives as long as the shard. Its memory is allocated only while a computation needs it (see
``flat_tensor.py``). If evaluation runs in full precision, there is a second unsharded tensor in that dtype.

*In torch:* ``FlatParamHandle`` in ``_flat_param.py``. Its parameter is both the shard and the unsharded tensor.

Spec: SHARD-02, SHARD-03, SHARD-09, SHARD-13, FWD-04, ORIG-12, ORIG-15, MP-02, MP-03, OFF-02, STREAM-05, STREAM-10,
STREAM-12.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives, lifetime
from minifsdp.engine.comm_streams import COMPLETED, CommStreams, Handle
from minifsdp.engine.flat_params import (
    RegisteredFlatParam,
    RegisteredOrigParams,
    RegisteredParams,
    check_uniform_dtype,
)
from minifsdp.engine.flat_tensor import (
    FlatSharding,
    UnshardedTensor,
    distributed_tensor,
    memory_orders,
)
from minifsdp.engine.layout import Gradient, Layout, ParamInfo, Steps, replaced_error
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.placeholder import GUARD, guards_for
from minifsdp.engine.precision import Precision
from minifsdp.engine.shards import local_tensor

_HOOKS = operator.attrgetter("_backward_hooks")


class FlatLayout(Layout):
    """The parameters of one unit in one flat tensor.

    Args:
        module: the unit's module, where a flat parameter is registered.
        parameters: at least one, all of one dtype; also of one ``requires_grad``, unless ``use_orig_params``.
        mesh: the shard group and the replicate group.
        device: the compute device.
        precision: the dtype of the unsharded tensor, and whether sharded gradients keep the dtype of the reduction.
        offload: whether the shard is stored on the CPU.
        use_orig_params: whether the original parameters stay registered, as 1-D views, instead of a flat parameter.
        shows_kept: whether modules have the unsharded parameters between forward and backward if memory is kept.

    Attributes:
        specs, local_shapes: for each parameter, its spec if it is a DTensor, and its shape in the flat tensor.
        shard_range: the elements of the flat tensor that this rank stores.
        is_copied: whether the unsharded tensor is a cast or moved copy of a shard that has all elements.
        is_stored: whether to compute in the stored dtype.
    """

    @lifetime.outside_inference_mode
    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[nn.Parameter, ParamInfo],
        mesh: MeshGroups,
        device: torch.device,
        precision: Precision,
        *,
        offload: bool = False,
        use_orig_params: bool = False,
        shows_kept: bool = False,
    ) -> None:
        check_uniform_dtype(module, parameters)
        self.mesh = mesh
        self.group = mesh.shard
        self.device = device
        self.offloads = offload
        self.use_orig_params = use_orig_params
        self.param_infos = list(parameters.values())
        self.specs = [
            original._spec if isinstance(original, DTensor) else None
            for original in parameters
        ]
        self.is_distributed = any(spec is not None for spec in self.specs)
        values = [local_tensor(original.detach()) for original in parameters]
        self.local_shapes = [value.shape for value in values]
        self.sharding = FlatSharding(
            tuple(value.numel() for value in values),
            mesh.num_shards,
            memory_orders(values),
        )
        self.shard_range = self.sharding.shard_range(mesh.shard_index)
        shard = self.sharding.make_shard(values, mesh.shard_index).to(
            "cpu" if offload else device
        )
        if offload and device.type != "cpu":
            shard = shard.pin_memory()
        self.registered: RegisteredParams = (
            RegisteredOrigParams(parameters, shard, self.sharding, mesh.shard_index)
            if use_orig_params
            else RegisteredFlatParam(module, parameters, shard)
        )
        # The optimizer updates these tensors.
        self.local_parameters = self.registered.parameters
        self._shows_kept = shows_kept
        self.precision = precision
        self.steps = Steps()
        # By dtype: the compute dtype, and the stored dtype if a module was evaluated in full precision.
        self._variants: dict[torch.dtype, UnshardedTensor] = {}
        self.use_stored_dtype(False)
        self._is_shared = self._is_written = False
        self._on_gradient: Callable[[], None] | None = None
        self._before_concat: Callable[..., None] | None = None
        self._last_all_gather: object = None
        # The views of the last recorded forward.
        self._recorded: Sequence[torch.Tensor] | None = None
        # Placeholders and views are in a module's ``__dict__``, because ``_parameters`` would list them as registered.
        dict_of = operator.attrgetter("_parameters") if use_orig_params else vars
        self.attributes = [
            (dict_of(attribute.module), attribute, index)
            for index, info in enumerate(self.param_infos)
            for attribute in info.places
        ]
        # A flat parameter whose memory the modules use directly is always unsharded.
        always = self.is_borrowed and not use_orig_params
        # Placeholders raise an error without a guard.
        self._guards = guards_for(self.param_infos) if use_orig_params or always else []
        self._is_guarded = False
        self._assign(
            self.views_of(self.unsharded.leaf)
            if always
            else self.registered.sharded_params
        )

    # --- the unsharded tensor ---

    def use_stored_dtype(self, stored: bool) -> None:
        """Sets whether the next forwards use the stored dtype or the compute dtype. The unit must be sharded."""
        shard = self.registered.shard
        dtype = shard.dtype if stored else self.precision.computes_in(shard.dtype)
        if dtype not in self._variants:
            # If the unit is neither sharded nor cast, it computes in the memory of the shard.
            borrows = (
                self.mesh.shard is None
                and dtype is shard.dtype
                and shard.device == self.device
            )
            unsharded = UnshardedTensor(
                self.sharding.padded_numel,
                dtype,
                self.device,
                shard if borrows else None,
            )
            unsharded.leaf.register_post_accumulate_grad_hook(
                functools.partial(_complete, weakref.ref(self))
            )
            self._variants[dtype] = unsharded
        self.unsharded = self._variants[dtype]
        self.is_borrowed = self.unsharded.is_borrowed
        self.is_copied = self.mesh.shard is None and not self.is_borrowed
        # One leaf for all parameters, in each dtype that is in use.
        self.leaves = [variant.leaf for variant in self._variants.values()]
        self.is_stored = stored
        self.dtype = dtype
        self.num_bytes = self.unsharded.num_bytes

    def on_gradient(
        self,
        notify: Callable[[], None] | None,
        before_concat: Callable[..., None] | None = None,
    ) -> bool:
        """Sets the functions to call when the unsharded gradient is complete, and before it is concatenated."""
        self._on_gradient = notify
        self._before_concat = before_concat
        self._update_guards()
        return True

    @lifetime.outside_inference_mode
    def refresh(self) -> None:
        """Adapts to a shard whose dtype has changed."""
        self.registered.refresh_from_module()
        if self.dtype is not self.precision.computes_in(self.registered.shard.dtype):
            self._variants.clear()
            self.use_stored_dtype(False)

    # --- memory ---

    def all_gather(self, comm_streams: CommStreams) -> Handle | None:
        """Fills the unsharded tensor by an all-gather, or by a copy of the shard if the unit is not sharded."""
        if self.registered.write_back() or self._is_written:
            # Copied on the compute stream. The communication stream must wait for that.
            comm_streams.all_gather.wait_compute()
            self._is_written = False
        self._last_all_gather = self.steps.count, self.registered.stamp()
        output = self.unsharded
        shard = self.registered.shard.data
        group = self.mesh.shard
        if output.is_borrowed:
            output.use_memory_of(shard)
            return None
        with comm_streams.all_gather as comm_stream:
            output.allocate()
            local_shard = shard
            if shard.device != self.device or shard.dtype is not self.dtype:
                # A cast, or a copy to the device, writes to this rank's part of the all-gather output.
                local_shard = output.alias[self.shard_range]
                local_shard.copy_(shard, non_blocking=True)
            work = (
                COMPLETED
                if group is None
                else collectives.all_gather(group, output.alias, local_shard, self.name)
            )
            return comm_stream.handle(work)

    def free(self) -> ReleaseEvent | None:
        """Releases the memory of the unsharded tensor, unless it is the memory of the shard."""
        return None if self.is_borrowed else lifetime.release(self.unsharded.alias)

    def is_stale(self) -> bool:
        """Whether the shard has changed since the last all-gather. A copy without an all-gather is never kept."""
        return self._last_all_gather != (self.steps.count, self.registered.stamp())

    # --- the attributes of modules ---

    def use_unsharded_params(self, *, is_backward: bool = False) -> None:
        """Assigns new views, or in backward those of the last recorded forward, to the modules.

        Raises:
            RuntimeError: if a module has another tensor, for example inside ``functional_call``.
        """
        # Without this check, tensors that the user assigned since the forward would be overwritten silently.
        assigned = self.assigned
        for dictionary, attribute, index in self.attributes:
            if (
                attribute.name not in dictionary
                or dictionary[attribute.name] is not assigned[index]
            ):
                raise replaced_error(self, attribute)
        if is_backward:
            # For a recomputed forward inside this unit.
            if self._recorded is not None:
                if any(map(_HOOKS, (*self.registered.sharded_params, *self._recorded))):
                    self._call_hooks_for(self._recorded)
                self._assign(self._recorded)
            return
        leaf = self.unsharded.leaf
        requires_grad = self.registered.requires_grad
        if leaf.requires_grad is not requires_grad:
            leaf.requires_grad_(requires_grad)
            self.unsharded.lasting_views = None
        # Notes 1 and 2: create the views at the moment of use, with one split.
        views = self.views_of(leaf)
        if torch.is_grad_enabled():
            self._recorded = views
            if any(map(_HOOKS, self.registered.sharded_params)):
                self._call_hooks_for(views)
            notify = self._before_concat
            is_split = not self.sharding.is_single
            if (
                notify is not None
                and is_split
                and leaf.requires_grad
                and not self.is_distributed
            ):
                # Register on the backward of the split, which runs after the backward of the view and its permutation.
                node: Any = views[0].grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                (
                    node.next_functions[0][0] if 0 in self.sharding.orders else node
                ).register_prehook(notify)
        self._assign(views)

    def _call_hooks_for(self, views: Sequence[torch.Tensor]) -> None:
        """Makes autograd call the user's tensor hooks with the gradients of ``views``, before they are reduced."""
        for view, sharded in zip(views, self.registered.sharded_params, strict=True):
            # The user may have registered the first hook on the view.
            sharded._backward_hooks = hooks = (
                sharded._backward_hooks or view._backward_hooks
            )
            if hooks and view.grad_fn is not None and view._backward_hooks is not hooks:
                view._backward_hooks = hooks
                view.grad_fn._register_hook_dict(view)

    def use_kept_params(self, *, is_kept: bool) -> None:
        """Assigns the sharded tensors, unless the strategy keeps original parameters unsharded (ORIG-09)."""
        if is_kept and self._shows_kept:
            for view, original in zip(
                self.assigned, self.registered.sharded_params, strict=True
            ):
                # The user may register hooks on the view.
                vars(view)["original"] = original
        else:
            self.use_sharded_params()

    def use_sharded_params(self) -> None:
        """Assigns the sharded tensors to the modules, or views of a flat parameter that is always unsharded."""
        sharded_params = self.registered.sharded_params
        if self.is_borrowed and not self.use_orig_params:
            self._assign(self._lasting_views())
            return
        if self.assigned is not sharded_params:
            self._assign(sharded_params)

    def _lasting_views(self) -> list[torch.Tensor]:
        """Views of a flat parameter that is always unsharded, for the time between forwards.

        Autograd rejects a view of a split after an optimizer step. It accepts a view of a single range, at any time, so
        these views are created once.
        """
        unsharded = self.unsharded
        if unsharded.lasting_views is None:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                _disable_current_modes(),
            ):
                unsharded.lasting_views = self.views_of(unsharded.leaf, by_split=False)
        return unsharded.lasting_views

    def _assign(self, tensors: Sequence[torch.Tensor]) -> None:
        self.assigned = tensors
        if self.is_summoned:
            return
        for dictionary, attribute, index in self.attributes:
            dictionary[attribute.name] = tensors[index]
            if attribute.second_places:
                attribute.update_second_places(tensors[index])
        is_unfit = (
            tensors is self.registered.sharded_params or self._on_gradient is None
        )
        if self._guards and self._is_guarded is not is_unfit:
            self._update_guards()

    def _update_guards(self) -> None:
        """Adds or removes the forward guards. Sharded modules and modules without a gradient callback must not run."""
        is_unfit = (
            self.assigned is self.registered.sharded_params or self._on_gradient is None
        )
        self._is_guarded = is_unfit and not self.is_summoned
        for hooks, hook in self._guards:
            if self._is_guarded:
                hooks[GUARD] = hook
            else:
                hooks.pop(GUARD, None)

    # --- gradients ---

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """Takes the flat gradient of forwards in both precisions, and adds the unreduced gradient if requested."""
        gradient: torch.Tensor | None = None
        for leaf in self.leaves:
            if (other := leaf.grad) is not None:
                gradient = other if gradient is None else gradient + other
                leaf.grad = None
        if gradient is None:
            return None
        # Without a split, the gradient may share memory with other gradients of autograd.
        hooks = self.registered.shard._backward_hooks
        self._is_shared = bool(hooks) or self.sharding.is_single
        # Call the user's hooks on a flat parameter. Autograd does not call them, because its leaf is another tensor.
        for hook in list(hooks.values()) if hooks else ():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed.contiguous()
        if with_unreduced:
            unreduced = self.registered.take_unreduced()
            if unreduced is not None:
                is_same = unreduced.dtype is gradient.dtype
                gradient = unreduced.add_(gradient) if is_same else unreduced + gradient
                self._is_shared = False
        return Gradient([gradient])

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Adds ``gradient`` to the unreduced gradient in ``.grad``."""
        self.registered.keep_unreduced(
            gradient.parts[0].clone() if self._is_shared else gradient.parts[0]
        )

    def pack(
        self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False
    ) -> torch.Tensor:
        """Returns the flat gradient in ``dtype``. A flat gradient is already packed."""
        part = gradient.parts[0]
        is_copied = is_written and self._is_shared
        return (
            part.to(dtype, copy=is_copied)
            if is_copied or part.dtype is not dtype
            else part
        )

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        """Casts on the device, because a cast on the CPU would wait for the copy. PyTorch pins the copy's memory."""
        shard = self.registered.shard
        dtype = local_shard.dtype if self.precision.keep_reduce_dtype else shard.dtype
        return local_shard.to(dtype).to(shard.device, non_blocking=True)

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        """Adds a reduced gradient shard to ``.grad``."""
        dtype = self.registered.shard.dtype
        if local_shard.dtype is not dtype and not self.precision.keep_reduce_dtype:
            local_shard = local_shard.to(dtype)
        self.registered.add_reduced(local_shard)

    @property
    def has_unreduced(self) -> bool:
        """Whether ``.grad`` holds a gradient that was not reduced."""
        return self.registered.has_unreduced

    # --- the user ---

    def local_values(self) -> torch.Tensor:
        """This rank's shard, 1-D, including padding; not a copy."""
        self._write_back()
        return self.registered.shard.detach()

    def _write_back(self) -> None:
        """Updates the shard with parameters that the user gave other memory; not inside ``summon_full_params``."""
        if not self.is_summoned:
            self.registered.write_back()

    def overwrite_local(self, shard: torch.Tensor) -> None:
        """Writes new values into this rank's shard on the compute stream. The next all-gather waits for that."""
        self._write_back()
        self.registered.overwrite(shard)
        self._is_written = True

    def views_of(
        self, flat: torch.Tensor, *, by_split: bool = True
    ) -> list[torch.Tensor]:
        """The parameters in an unsharded flat tensor: views in the original shapes, or DTensors of them."""
        views = self.sharding.views(flat, self.local_shapes, by_split=by_split)
        if self.is_distributed:
            views = [
                distributed_tensor(view, spec)
                for view, spec in zip(views, self.specs, strict=True)
            ]
        for index, attributes in self.registered.user_attributes:
            vars(views[index]).update({**attributes, **vars(views[index])})
        return views

    def use_full_params(self, flat: torch.Tensor) -> list[nn.Parameter]:
        """Registers views of ``flat`` as parameters, in the modules' original order, for ``summon_full_params``."""
        self.is_summoned = True
        full_params = self.registered.use_full_params(self.views_of(flat))
        for dictionary, attribute, index in self.attributes:
            dictionary.pop(attribute.name)
            attribute.module._parameters[attribute.name] = full_params[index]
            attribute.update_second_places(full_params[index])
        self._update_guards()
        return full_params

    def remove_full_params(
        self, full_params: Sequence[nn.Parameter]
    ) -> list[ParamInfo]:
        """Registers the sharded parameters again. Returns the attributes that the user replaced meanwhile."""
        self.is_summoned = False
        found = [
            (info, info.module._parameters.pop(info.name, None), index)
            for _, info, index in self.attributes
        ]
        self._assign(self.assigned)
        self.registered.use_sharded_params()
        return [
            info
            for info, parameter, index in found
            if parameter is not full_params[index]
        ]


def _complete(this: weakref.ref[FlatLayout], leaf: torch.Tensor) -> None:
    """The hook of a leaf. C++ code holds it, and the garbage collector finds no cycles there, so ``this`` is weak."""
    layout = this()
    if layout is not None and layout._on_gradient is not None:
        layout._on_gradient()
