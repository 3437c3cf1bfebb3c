"""The flat layout: all parameters of a unit in one flat parameter, and views into it.

The parameters of a unit are concatenated into one 1-D tensor, which is split into equal shards, one for each rank.
Nothing is aligned or reordered. The last shard is padded.

Worked example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    concatenated   w w w w w w b b b          9 elements
    padded         w w w w w w b b b .        10, the next multiple of 2
    rank 0 stores  w w w w w                  a shard of 5; the weight is split
    rank 1 stores            w b b b .        a shard of 5, one element of padding

Advantage: an all-gather is *one* collective that writes directly into the memory that the forward reads, without a copy
before or after it. Disadvantage: a shard cannot be printed, saved or clipped as a weight.

The views:

1. Each forward creates them at the moment of use. Autograd runs the newest nodes first. Views from an earlier moment,
   such as the issue of the all-gather, would be older than the nodes of the previous unit. Then the gradient of this
   unit would be complete only after the backward of the previous unit, and the memory of both would be needed.
2. One ``split`` creates all of them, because its backward is one concatenation into one flat gradient. Parameters
   without a gradient count as zeros there. So does the padding, which is why the split includes it.

The unsharded tensor lives as long as the shard (see ``unsharded.py``). If evaluation runs in full precision, there is a
second one for that dtype. Memory is allocated only while a computation needs it.

*In torch:* ``FlatParamHandle`` in ``_flat_param.py``. Its parameter switches between sharded, padded, unsharded,
low-precision and CPU data. Here the shard and the unsharded leaf are two tensors. Torch pads between original
parameters; here a shard has ``ceil(total / N)`` elements (SHARD-02).

Spec: SHARD-02, SHARD-03, SHARD-09, SHARD-13, FWD-04, ORIG-12, ORIG-15, MP-02, MP-03, OFF-02, STREAM-05, STREAM-10,
STREAM-12.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from minifsdp.engine import collectives, optimizer_watch
from minifsdp.engine.comm_streams import COMPLETED, CommStreams, Handle
from minifsdp.engine.flat_parameter import FlatOwnership
from minifsdp.engine.layout import Gradient, Layout, ParamInfo, replaced_parameter_error
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.originals import OriginalOwnership
from minifsdp.engine.ownership import Ownership, check_uniform_dtype
from minifsdp.engine.partition import Form, Partition, local_part
from minifsdp.engine.placeholder import GUARD, guards_for
from minifsdp.engine.precision import Precision
from minifsdp.engine.unsharded import Unsharded


class FlatLayout(Layout):
    """The parameters of one unit in one flat tensor.

    Args:
        home: the unit's module, where the flat parameter is registered.
        parameters: at least one, all of one dtype; also of one ``requires_grad``, unless ``keep_originals``.
        mesh: the shard group and the replicate group.
        device: the compute device.
        precision: the dtype of the unsharded tensor, and whether sharded gradients keep the dtype of the reduction.
        offload: whether the shard is stored on the CPU.
        keep_originals: whether the optimizer owns the original parameters, as 1-D views, instead of a flat parameter.

    Attributes:
        forms: for each parameter, how it is stored in the flat tensor.
        hides_originals: whether the original parameters are not registered between computations.
        is_stored, is_recorded_stored: whether it computes in the stored dtype, now and in the last recorded forward.
        is_summoned: whether the modules have the unsharded parameters of ``summon_full_params``, see ``summoned.py``.
    """

    _before_concat: Callable[..., None] | None = None

    def __init__(
        self,
        home: nn.Module,
        parameters: Mapping[nn.Parameter, ParamInfo],
        mesh: MeshGroups,
        device: torch.device,
        precision: Precision,
        *,
        offload: bool = False,
        keep_originals: bool = False,
    ) -> None:
        check_uniform_dtype(home, parameters)
        self.mesh, self.device, self.offloads = mesh, device, offload
        self.parameters = list(parameters.values())
        self.forms = [Form.of(original) for original in parameters]
        self._any_distributed = any(form.spec is not None for form in self.forms)
        self.shapes = [owned.shape for owned in self.parameters]
        self._shapes_in_row = [form.shape for form in self.forms]
        self.partition = Partition(tuple(form.shape.numel() for form in self.forms), mesh.num_shards)
        shard = self.partition.laid_out([local_part(original.detach()) for original in parameters], mesh.shard_index)
        shard = shard.to("cpu" if offload else device)
        if offload and device.type != "cpu":
            shard = shard.pin_memory()
        keeps = precision.keep_reduce_dtype
        if keep_originals:
            self.owner: Ownership = OriginalOwnership(parameters, shard, self.partition, mesh.shard_index, keeps)
        else:
            self.owner = FlatOwnership(home, parameters, shard, keeps)
        self.hides_originals = self.owner.hides_originals
        self._compute_dtype = precision.computes_in(shard.dtype)
        self._variants: dict[torch.dtype, Unsharded] = {}
        self._on_gradient: Callable[[], None] | None = None
        self.use_stored_dtype(False)
        self._places = [
            # With a flat parameter, views are not in `_parameters`, which lists registered parameters.
            (vars(slot.module) if self.hides_originals else slot.module._parameters, slot, index)
            for index, owned in enumerate(self.parameters)
            for slot in owned.attributes
        ]
        self.is_summoned = self._is_shared = False
        self._gathered_at: object = None
        # The views of the last forward that autograd recorded.
        self._recorded: Sequence[torch.Tensor] | None = None
        # A unit that computes in the memory of the shard is always unsharded.
        stays = self._now.is_borrowed and self.hides_originals
        self._guards = guards_for(self.parameters) if stays or not self.hides_originals else []
        self._show(self.views_of(self._now.leaf) if stays else self.owner.placeholders)

    # --- the unsharded tensor ---

    def use_stored_dtype(self, stored: bool) -> None:
        """Selects the stored dtype or the compute dtype for the next forwards. The unit must be sharded."""
        shard = self.owner.shard
        dtype = shard.dtype if stored else self._compute_dtype or shard.dtype
        if dtype not in self._variants:
            # Neither sharded nor cast: computes in the memory of the shard.
            borrows = self.mesh.shard is None and dtype is shard.dtype and shard.device == self.device
            made = Unsharded(self.partition.padded_numel, dtype, self.device, shard if borrows else None)
            made.leaf.register_post_accumulate_grad_hook(functools.partial(_complete, weakref.ref(self)))
            self._variants[dtype] = made
        self._now, self.is_stored = self._variants[dtype], stored
        self.dtype, self.num_bytes = dtype, self._now.num_bytes

    def on_gradient(self, notify: Callable[[], None] | None, before_concat: Callable[..., None] | None = None) -> bool:
        """Sets the functions to call when the unsharded gradient is complete. A hook of the leaf detects that."""
        self._on_gradient, self._before_concat = notify, before_concat
        self._guard()
        return True

    def refresh_from_module(self) -> None:
        """Adapts to a shard that has another dtype now, for instance after ``model.half()``."""
        self.owner.refresh_from_module()
        if self.dtype is not (self._compute_dtype or self.owner.shard.dtype):
            self._variants.clear()
            self.use_stored_dtype(False)

    @property
    def is_trained(self) -> bool:
        """Whether a backward computes a gradient for this unit."""
        return self._now.leaf.requires_grad

    # --- memory ---

    @property
    def all_gather_group(self) -> Group | None:
        """The shard group."""
        return self.mesh.shard

    def all_gather(self, comm_streams: CommStreams) -> Handle | None:
        """Fills the unsharded tensor: by an all-gather, or by a copy of the shard if the unit is not sharded."""
        if self.owner.collect():
            # Copied on the compute stream. The communication stream must wait for that.
            comm_streams.all_gather.wait_compute()
        self._gathered_at = self.steps.count, self.owner.stamp()
        now, shard, group = self._now, self.owner.shard.data, self.mesh.shard
        if now.is_borrowed:
            now.wait_compute(shard)
            return None
        with comm_streams.all_gather as comm_stream:
            now.allocate()
            local_shard = shard
            if shard.device != self.device or shard.dtype is not self.dtype:
                # A cast, or a copy to the device, writes to this rank's part of the all-gather output.
                local_shard = now.alias[self.partition.local_shard(self.mesh.shard_index)]
                local_shard.copy_(shard, non_blocking=True)
            work = COMPLETED if group is None else collectives.all_gather(group, now.alias, local_shard, self.name)
            return comm_stream.handle(work)

    def free(self) -> ReleaseEvent | None:
        """Releases the memory of the unsharded tensor."""
        return self._now.release()

    def is_stale(self) -> bool:
        """Whether the shard has changed since the last all-gather. A copy without an all-gather is always stale."""
        is_copy = self.mesh.shard is None and not self._now.is_borrowed
        return is_copy or self._gathered_at != (self.steps.count, self.owner.stamp())

    # --- the attributes of modules ---

    def accept_replacements(self) -> None:
        """Raises an error if a module has another tensor than the one that was assigned last."""
        shown = self._shown
        for dictionary, slot, index in self._places:
            if dictionary.get(slot.name) is not shown[index]:
                raise replaced_parameter_error(slot, self.name)

    def use_unsharded_params(self) -> None:
        """Creates new views and assigns them to the modules."""
        leaf = self._now.leaf
        leaf.requires_grad_(self.owner.requires_grad)
        # 1. and 2. At the moment of use, and by one split.
        views = self.views_of(leaf)
        if torch.is_grad_enabled():
            self._recorded, self.is_recorded_stored = views, self.is_stored
            if self._before_concat is not None and len(views) > 1 and leaf.requires_grad and not self._any_distributed:
                # The backward of the split, which runs after that of the view.
                views[0].grad_fn.next_functions[0][0].register_prehook(self._before_concat)  # type: ignore[union-attr]
        self._show(views)

    def use_unsharded_params_again(self) -> None:
        """Assigns the views of the recorded forward again, for a recomputed forward inside this unit."""
        # Otherwise tensors that the user assigned since the forward would be overwritten silently.
        self.accept_replacements()
        if self._recorded is not None:
            self._show(self._recorded)

    def use_kept_params(self, *, is_kept: bool) -> None:
        """Assigns the sharded tensors, unless unsharded original parameters are kept on purpose (ORIG-09)."""
        if not is_kept or self.hides_originals or self.mesh.shard is None:
            self.use_sharded_params()

    def use_sharded_params(self) -> None:
        """Assigns the sharded tensors to the modules, unless the unsharded views are always valid."""
        if self._shown is not self.owner.placeholders and not (self._now.is_borrowed and self.hides_originals):
            self._show(self.owner.placeholders)

    def _show(self, tensors: Sequence[torch.Tensor]) -> None:
        self._shown = tensors
        for dictionary, slot, index in self._places:
            dictionary[slot.name] = tensors[index]  # type: ignore[assignment]
            if slot.second_list:
                slot.update_second_list(tensors[index])
        if self._guards:
            self._guard()

    def _guard(self) -> None:
        """Adds or removes the forward guards. Modules must not run while sharded, or without a gradient callback."""
        is_unfit = self._shown is self.owner.placeholders or self._on_gradient is None
        for hooks, hook in self._guards:
            if is_unfit and not self.is_summoned:
                hooks[GUARD] = hook
            else:
                hooks.pop(GUARD, None)

    # --- gradients ---

    @property
    def has_gradient(self) -> bool:
        """Whether a leaf has a gradient."""
        return self._now.leaf.grad is not None or any(v.leaf.grad is not None for v in self._variants.values())

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """Takes the flat gradient, summed over forwards in both precisions, and adds the unreduced one if requested."""
        gradient, self._now.leaf.grad = self._now.leaf.grad, None
        for variant in self._variants.values() if len(self._variants) > 1 else ():
            if (other := variant.leaf.grad) is not None:
                gradient, variant.leaf.grad = other if gradient is None else gradient + other, None
        if gradient is None:
            return None
        # Without a split, the gradient may share memory with other gradients of autograd.
        hooks = list((self.owner.shard._backward_hooks or {}).values())
        self._is_shared = bool(hooks) or self.partition.is_single
        # The user's hooks on a flat parameter. Autograd does not call them, because its leaf is another tensor.
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed.contiguous()
        if with_unreduced:
            unreduced = self.owner.take_unreduced()
            if unreduced is not None:
                is_same = unreduced.dtype is gradient.dtype
                gradient, self._is_shared = unreduced.add_(gradient) if is_same else unreduced + gradient, False
        return Gradient([gradient])

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Adds ``gradient`` to the unreduced gradient in ``.grad``."""
        self.owner.keep_unreduced(gradient.parts[0].clone() if self._is_shared else gradient.parts[0])
        optimizer_watch.note_unreduced(self)

    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        """Returns the flat gradient in ``dtype``. It is packed already.

        Args:
            is_written: the caller, or other code while the result is sent, may write to its memory.
        """
        return gradient.parts[0].to(dtype, copy=is_written and self._is_shared)

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        """Casts on the device, because the CPU would have to wait for the copy. PyTorch pins the copy's memory."""
        dtype = local_shard.dtype if self.owner.keep_reduce_dtype else self.owner.shard.dtype
        return local_shard.to(dtype).to(self.owner.shard.device, non_blocking=True)

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        """Adds a reduced gradient shard to ``.grad``."""
        self.owner.add_reduced(local_shard)

    @property
    def has_unreduced(self) -> bool:
        """Whether ``.grad`` holds a gradient that was not reduced."""
        return self.owner.has_unreduced

    # --- the user ---

    def local_values(self) -> torch.Tensor:
        """This rank's shard, 1-D, including padding; not a copy."""
        self._collect()
        return self.owner.shard.detach()

    def _collect(self) -> None:
        """Copies parameters that the user gave other memory into the shard; not inside ``summon_full_params``."""
        if not self.is_summoned:
            self.owner.collect()

    def overwrite_local(self, local_shard: torch.Tensor) -> None:
        """Writes new values into this rank's shard."""
        self._collect()
        self.owner.overwrite(local_shard)

    def views_of(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in an unsharded flat tensor ``row``: views in the original shapes, or DTensors of them."""
        views = self.partition.views(row, self._shapes_in_row)
        if self._any_distributed:
            views = [form.show(view) for form, view in zip(self.forms, views, strict=True)]
        return views

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters of this unit that the optimizer owns."""
        return self.owner.parameters

    def use_summoned_params(self, parameters: Sequence[nn.Parameter]) -> None:
        """Registers unsharded parameters on the modules for ``summon_full_params``, in the modules' original order."""
        self.is_summoned = True
        for dictionary, slot, index in self._places:
            dictionary.pop(slot.name)
            slot.module._parameters[slot.name] = parameters[index]
            slot.update_second_list(parameters[index])
        self._guard()

    def hide_summoned(self, parameters: Sequence[nn.Parameter]) -> list[ParamInfo]:
        """Restores the attributes of the modules. Returns the slots that did not hold one of ``parameters``."""
        self.is_summoned = False
        found = [(slot, slot.module._parameters.pop(slot.name, None), index) for _, slot, index in self._places]
        self._show(self._shown)
        return [slot for slot, parameter, index in found if parameter is not parameters[index]]

    def forget_gather(self) -> None:
        """Marks the unsharded tensor as stale. Called after a change that `stamp` does not detect."""
        self._gathered_at = None


def _complete(this: weakref.ref[FlatLayout], leaf: torch.Tensor) -> None:
    """The hook of a leaf. C++ holds it, where the garbage collector finds no cycle, so it refers to ``this`` weakly."""
    layout = this()
    if layout is not None and layout._on_gradient is not None:
        layout._on_gradient()
