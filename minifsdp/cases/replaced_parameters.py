"""Parameters that the program replaces or converts after sharding.

The optimizer's parameters get other tensors, or other memory::

    fully_shard(model)
    model.to_empty(device="cuda")                      # after `with torch.device("meta")`
    model.load_state_dict(state_dict, assign=True)     # other tensor objects
    model.to(torch.bfloat16)                           # another dtype

Without this case, a forward uses the values from before: the buckets do not contain the new ones. After
``load_state_dict(assign=True)``, it raises an error.

When a forward begins, the case compares the registered tensors with those of each layout. It copies new values into the
buckets, or into new buckets if the dtype has changed. An earlier check could find two dtypes in a unit, because modules
are converted one by one.

*In torch:* ``FSDPParam.reset_sharded_param`` after ``Module._apply``, and in ``lazy_init``.

Spec: FS2-META-03, FS2-28, NEW-23.
"""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.cases.grad_dtypes import add_in_grad_dtype, keep_grad_dtype
from minifsdp.cases.optimizer_steps import optimizer_steps
from minifsdp.engine import lifetime
from minifsdp.engine.bucket import assign_to_buckets
from minifsdp.engine.layout import full_name, replaced_error
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.root import RootState
from minifsdp.engine.sharded_param import local_shard_of, set_local_shard
from minifsdp.engine.unit import Phase


class ReplacedParameters:
    """Accepts the changes of all units when a root is created, and when a forward begins.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._units = root_state.units
        root_state.iteration.points.forward_begins.append(self._accept)
        self._accept(is_converted=True)

    def _accept(self, *, is_converted: bool = False) -> None:
        for unit in self._units:
            layout: Any = unit.layout
            if unit.phase is Phase.SUMMONED:
                continue
            if layout.shards_are_dtensors:
                accept_changes(layout, is_converted=is_converted)
            elif is_converted:
                layout.refresh()
            else:
                # A flat parameter cannot be replaced. Raise the error before the first collective.
                for dictionary, attribute, index in layout.attributes:
                    if (
                        attribute.name not in dictionary
                        or dictionary[attribute.name] is not layout.assigned[index]
                    ):
                        raise replaced_error(layout, attribute)


def accept_changes(layout: PerParameterLayout, *, is_converted: bool = False) -> None:
    """Accepts tensors that the program has registered instead of the layout's tensors, and values in other memory.

    Args:
        layout: the layout.
        is_converted: whether the whole model may have been converted, also by a change that keeps every tensor.

    Raises:
        RuntimeError: if a registered tensor cannot be a parameter of the layout.
    """
    is_edited = False
    for dictionary, attribute, index in layout.attributes:
        name = attribute.name
        found = dictionary[name] if name in dictionary else None  # noqa: SIM401
        param = layout.params[index]
        if found is layout.assigned[index]:
            is_edited |= local_shard_of(param.parameter) is not param.local_shard
            continue
        if not isinstance(found, nn.Parameter) or not _fits(found, param.parameter):
            raise replaced_error(layout, attribute)
        before = param.parameter
        param.parameter = found
        if found.grad_dtype is found.dtype:
            keep_grad_dtype(before, found)
        is_edited = True
    if is_edited:
        optimizer_steps.forget()
        _update_buckets(layout, is_edited=True)
    elif len(layout.buckets) > 1:
        # Other parameters, with another dtype, may have become trainable.
        layout.choose_dtype()
    if is_converted:
        _refresh(layout)


def _fits(found: nn.Parameter, parameter: nn.Parameter) -> bool:
    """Whether ``found`` is a DTensor of the shape, the mesh and the placements of ``parameter``."""
    return (
        isinstance(found, DTensor)
        and isinstance(parameter, DTensor)
        and found.shape == parameter.shape
        and found.device_mesh == parameter.device_mesh
        and found.placements == parameter.placements
    )


@lifetime.outside_inference_mode
def _update_buckets(layout: PerParameterLayout, *, is_edited: bool) -> None:
    """Copies the current values of the parameters into their buckets. Raises an error if they have two devices."""
    local_shards = [local_shard_of(param.parameter) for param in layout.params]
    if len({local_shard.device for local_shard in local_shards}) > 1:
        names = [full_name(layout.name, param.info.path) for param in layout.params]
        devices = zip(names, local_shards, strict=True)
        parameters = ", ".join(
            f"{name} ({local_shard.device})" for name, local_shard in devices
        )
        raise RuntimeError(message("converted-apart", parameters=parameters))
    for bucket in layout.buckets:
        # Not from the larger shards of a smaller mesh, which have the values from before.
        bucket.gather_from(None)
    # From now on the values stay on the device that the user chose.
    layout.options = replace(layout.options, offload=False)
    buckets = assign_to_buckets(
        layout.params, local_shards, layout.options, layout.buckets
    )
    for param in layout.params:
        set_local_shard(param.parameter, param.local_shard)
    # Values were copied into the memory of an existing bucket or of a new bucket.
    layout.has_copied |= is_edited or layout.buckets != buckets
    layout.buckets = buckets
    layout.use_buckets()
    add_in_grad_dtype(layout)


def _refresh(layout: PerParameterLayout) -> None:
    """Adapts to changes of all parameters. Raises an error if some are on the meta device."""
    # A case may take another parameter now.
    _update_buckets(layout, is_edited=False)
    on_meta = [param for param in layout.params if param.local_shard.is_meta]
    without = [full_name(layout.name, param.info.path) for param in on_meta]
    if without and layout.device.type != "meta":
        raise RuntimeError(message("still-meta", without=without))
